"""The roles of a run (actor, learner, manager), the same on every runtime."""
