"""Validation of environments: each mistake is reported as one sentence."""
