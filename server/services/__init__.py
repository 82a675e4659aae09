"""The gRPC services, one module each: they translate between the wire and the core, and decide nothing."""
