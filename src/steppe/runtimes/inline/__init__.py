"""The `inline` runtime: all roles in the caller's process."""
