"""What several algorithms share: the torch base, on-policy rollouts, returns, target networks, several policies."""
