"""Simulation of a fleet of hosts that each run one kvtier server."""
