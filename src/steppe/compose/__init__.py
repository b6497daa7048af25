"""The composition API on top of training: asynchronous loops, ensembles, clusters."""
