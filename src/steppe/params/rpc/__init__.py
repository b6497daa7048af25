"""Remote access to the parameter server: servers and clients for gRPC and shared memory."""
