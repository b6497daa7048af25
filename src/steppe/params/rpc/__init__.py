"""The parameter server for other processes: gRPC and shared memory, servers and clients."""
