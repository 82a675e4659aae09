"""Handlers of the gRPC services: each checks its request and calls the core."""
