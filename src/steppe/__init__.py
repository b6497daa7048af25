"""Steppe: reinforcement learning from a Q-table on one core to a cluster, with one set of parts."""
