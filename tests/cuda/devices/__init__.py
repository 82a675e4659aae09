"""What tests of devices share: back ends, KV tensors, an engine's process."""
