"""Tier that stores blocks in slab files, with an index in LMDB."""
