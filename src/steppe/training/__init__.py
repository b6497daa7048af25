"""Build a plan, launch it, supervise it and finish it: train, resume, rerun, evaluate and load."""
