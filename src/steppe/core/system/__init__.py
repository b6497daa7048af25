"""The process and the machine: threads, seeds, clocks, shared directories, run-time type checks."""
