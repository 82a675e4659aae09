"""The server process and the `kvtier` command line: services, sessions, configuration, metrics.

Uses `protos`, `tiers` and `cuda`; has no code for a particular engine.
"""
