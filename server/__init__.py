"""`kvtier serve` and its kin: services, sessions, configuration, metrics, the command line.

Wires `protos`, `tiers` and `cuda` together; knows no engine.
"""
