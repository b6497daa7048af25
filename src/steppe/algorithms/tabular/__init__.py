"""Tabular algorithms and their compiled kernels. No module in this package imports torch.

The public names are in `steppe.classic`.
"""
