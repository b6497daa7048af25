"""MPI: segments, weights and shared tables between ranks."""
