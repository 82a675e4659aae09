"""Checks of `kvtier doctor`: a module per topic, a function per check. Checks change nothing."""
