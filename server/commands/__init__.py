"""The commands of `kvtier`, a module each, with a function `run`.

All flags are in `parser`, which loads nothing else.

A module is imported when its command is run: they may import at their top what they like.
"""
