"""`kvtier completion`: completion script of a shell, generated from the parser."""

from __future__ import annotations

import argparse

from .console import EXIT_FAILURE, print_line, refuse
from .parser import new_parser

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        return refuse(["shtab is missing: pip install 'kvtier[server]'"], EXIT_FAILURE)
    print_line(shtab.complete(new_parser(), shell=options.shell).rstrip())
    return 0
