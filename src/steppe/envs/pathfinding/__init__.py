"""Multi-agent pathfinding, stepped by compiled kernels."""
