"""Helpers shared by storage tiers: buffers, batches, checksums, health, checks of stored blocks."""
