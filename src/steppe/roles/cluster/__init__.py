"""A node of a cluster, and parameter servers in MPI and Ray."""
