"""The server process and the `kvtier` command line: services, sessions, configuration, metrics.

Uses `protos`, `tiers` and `cuda`; has no code for a particular engine. Numbers such as (B3.4) cite
docs/behaviour.md.
"""
