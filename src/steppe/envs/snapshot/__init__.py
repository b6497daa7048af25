"""Snapshots of environments, read and restored without pickle."""
