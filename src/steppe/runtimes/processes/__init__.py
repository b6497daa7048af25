"""The `processes` runtime: one process per worker slot on this machine."""
