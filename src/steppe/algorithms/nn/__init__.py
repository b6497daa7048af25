"""Networks: torsos, heads, distributions, normalizers, and their compiled kernels."""
