"""Snapshots of environments: read, stored and restored without pickle."""
