"""Vectorized environments, and the conversion between Gymnasium spaces and arrays."""
