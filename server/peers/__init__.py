"""Blocks from servers on other hosts, which a call names as its source."""
