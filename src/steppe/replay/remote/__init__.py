"""Replay in separate roles: the learner's client and the replay server."""
