"""Preprocessing of observations, actions and rewards."""
