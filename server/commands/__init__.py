"""Commands of `kvtier`: one module per command, with a function `run`.

All flags are declared in `parser`. The module of a command is imported only when the command runs.
"""
