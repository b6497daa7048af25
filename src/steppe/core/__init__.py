"""The words everyone uses. This room imports nothing else of ours."""
