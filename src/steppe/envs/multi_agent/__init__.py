"""Multi-agent environments."""
