"""Code shared by several algorithms: the torch base class, on-policy rollouts, returns, target networks."""
