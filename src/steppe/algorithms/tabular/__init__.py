"""Learners whose knowledge is a table of action values, and their compiled kernels. No torch anywhere in here.

The public names are in `steppe.classic`.
"""
