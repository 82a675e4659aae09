"""Host-memory stand-in for a device driver."""
