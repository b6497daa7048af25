"""Groups of runs that differ by their seed, and reports on them."""
