"""A run that a child process controls: the parent's and the child's ends of two pipes."""
