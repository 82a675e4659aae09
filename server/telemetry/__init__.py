"""Metrics, status page, health, logs and traces of a server."""
