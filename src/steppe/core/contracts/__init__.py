"""Contracts between packages: policies, algorithms, environments, segments, weights, transport, reports, errors."""
