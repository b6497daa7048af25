"""The composition API on top of training: agent, environment, loops, ensembles, clusters."""
