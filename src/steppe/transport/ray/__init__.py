"""Ray: segments, weights and shared tables between actors."""
