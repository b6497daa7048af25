"""How many actors a run should have, and the loop that sets it."""
