"""The `kafka` runtime: worker slots linked by topics, on this machine or in containers."""
