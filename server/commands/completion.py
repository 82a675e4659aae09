"""`kvtier completion`: completion script of a shell, generated from the parser."""

from __future__ import annotations

import argparse

import shtab

from .console import print_line
from .parser import new_parser

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    print_line(shtab.complete(new_parser(), shell=options.shell).rstrip())
    return 0
