"""The benchmark suite: runs the benchmarks of the parent directory and of other libraries, and writes reports."""
