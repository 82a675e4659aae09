"""Tier that stores blocks in an LMDB environment."""
