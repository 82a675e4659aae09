"""Counters, histories and estimates that the core keeps for operators."""
