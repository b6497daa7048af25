"""Recurrent networks: the cell, its compiled kernels, and the network around it."""
