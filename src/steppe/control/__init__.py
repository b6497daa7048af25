"""The outside: every operation on runs once (service.py), and the doors to them. Doors only translate."""
