"""The `processes` runtime: one process per place on this machine."""
