"""Checks of environments, which report what is wrong with them in sentences."""
