"""Workers that push gradients, and the learner that applies them."""
