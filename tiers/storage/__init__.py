"""Helpers of all storage tiers: buffers, batches, checksums, health, checks of stored blocks."""
