"""The carriers: loopback (one process), shm (one host), grpc (anywhere)."""
