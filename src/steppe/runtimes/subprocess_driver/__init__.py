"""A run that another process directs, through two pipes: the parent's end and the child's."""
