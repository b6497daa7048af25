"""The benchmark suite: runs each benchmark of this directory's parent beside its peers, and reports what was measured."""
