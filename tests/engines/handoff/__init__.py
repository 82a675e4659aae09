"""A package, so that shared fixtures end with its last test."""
