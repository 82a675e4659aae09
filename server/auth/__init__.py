"""Authentication, roles, rate limits and the audit log."""
