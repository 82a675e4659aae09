"""Benchmark of kvtier and its peers (LMCache, Mooncake, Valkey): equal work, all bytes compared."""
