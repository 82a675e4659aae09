"""Scheduler half of the vLLM connector."""
