"""Transports of both clients: perform the effects of operations over gRPC and sockets."""
