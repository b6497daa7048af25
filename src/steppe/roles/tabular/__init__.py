"""Workers that share a table, and the learner that owns it."""
