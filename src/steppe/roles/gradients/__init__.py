"""Workers that push gradients, and the learner's side that applies them."""
