"""Framings of bytes that travel outside protobuf messages."""
