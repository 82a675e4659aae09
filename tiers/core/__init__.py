"""Decision core of the service: events in, commands out; no I/O, no clock, no threads."""
