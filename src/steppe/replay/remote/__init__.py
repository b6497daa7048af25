"""Replay in roles of its own: the learner's client and the server."""
