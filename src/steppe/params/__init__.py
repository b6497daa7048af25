"""The parameter server: aggregation of workers' updates, rounds, server-side optimizers, privacy, remote access."""
