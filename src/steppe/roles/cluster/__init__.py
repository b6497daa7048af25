"""A cluster node, and parameter servers over MPI and Ray."""
