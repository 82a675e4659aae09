"""Runs tiers on threads and checks that they keep to their contract."""
