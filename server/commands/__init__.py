"""Commands of `kvtier`: one module per command, with a function `run`; `parser` has all flags."""
