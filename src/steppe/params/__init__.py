"""The parameter server: aggregation of many workers' updates, rounds, server-side optimizers, privacy, network service."""
