"""Workers that share a table, and the learner's side that keeps it."""
