"""Adapters that connect kvtier to an engine's own KV connector interface, one per engine."""
