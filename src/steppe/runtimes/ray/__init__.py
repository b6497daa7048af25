"""The `ray` runtime: one Ray actor per worker slot."""
