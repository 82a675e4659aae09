"""Checks of `kvtier doctor`: one module per topic, one function per check."""
