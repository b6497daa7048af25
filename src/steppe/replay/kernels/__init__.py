"""Compiled kernels of replay: copies, ring indices, the sum tree, sampling by priority."""
