"""Small environments with known answers, for tests and tutorials."""
