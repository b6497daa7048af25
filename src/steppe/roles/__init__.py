"""The loops of a run, the same on every runtime: actor, learner, manager."""
