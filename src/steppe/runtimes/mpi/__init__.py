"""The `mpi` runtime: one rank per place."""
