"""Process and machine: threads, seeds, clocks, shared directories, run-time type checks."""
