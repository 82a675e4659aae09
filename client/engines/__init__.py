"""Adapters that put kvtier behind an engine's own KV connector interface, one package per engine."""
