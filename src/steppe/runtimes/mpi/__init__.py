"""The `mpi` runtime: one rank per worker slot."""
