"""Child processes, systemd notification and garbage collector settings."""
