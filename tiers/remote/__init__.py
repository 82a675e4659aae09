"""Tiers that several servers share over the network, and what all of them need."""
