"""The `ray` runtime: one Ray actor per place."""
