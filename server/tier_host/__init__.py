"""Runs tiers on threads and checks that they comply with the contract of `tiers.secondary_tier`."""
