"""Child processes, systemd notification and settings of Python's garbage collector."""
