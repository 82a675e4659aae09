"""The server process and the `kvtier` command line: services, sessions, configuration, metrics.

This package uses `protos`, `tiers` and `cuda`. It has no code for a particular engine. Numbers such
as (B3.4) cite docs/behaviour.md.
"""
