"""Benchmarks of kvtier, each against a limit of the machine that is measured in the same run.

make bench JSON=FILE
python -m bench [--json FILE] [--only NAME …]
"""
