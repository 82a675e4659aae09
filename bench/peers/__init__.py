"""Benchmark of kvtier beside its peers, with equal work and every byte compared."""
