"""Decision core of the service: events in, commands out; no I/O, no clock, no threads.

Numbers like (B4.3) cite docs/behaviour.md.
"""
