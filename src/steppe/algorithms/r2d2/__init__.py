"""Recurrent Q-learning from sequences."""
