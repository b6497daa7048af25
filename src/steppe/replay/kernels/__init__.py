"""Compiled kernels of replay: copies, ring indices, the sum tree, draws by priority."""
