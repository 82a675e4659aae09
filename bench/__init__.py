"""Benchmarks of kvtier. Most results are compared with a limit of the machine, such as memcpy.

make bench JSON=FILE
python -m bench [--json FILE] [--only NAME …]
"""
