"""What kvtier costs, against what the machine can do: every limit is measured in the same run, none is a constant.

make bench JSON=FILE        or        python -m bench [--json FILE] [--only NAME …]
"""
