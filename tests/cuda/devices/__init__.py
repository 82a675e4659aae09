"""Shared parts of device tests: back ends, KV tensors, an engine's process."""
