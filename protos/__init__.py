"""The wire contract: `kvtier.v1` and the few bytes that travel outside of protobuf."""
