"""Tiered block cache: the decision core, the tier contract and the storage tiers.

The core (`core`, `eviction`, `stats`) does no I/O, reads no clock and uses no threads. The storage
tiers (`lmdb`, `disk`) do their I/O on the thread that calls them. This module exports what the
author
of a tier needs.
"""
