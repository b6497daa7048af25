"""The configuration of a run and of a cluster, its validation, and references to callables as text."""
