"""Events of the tiers: reading them from the core, and publishing them over ZeroMQ."""
