"""`kvtier config`: the effective configuration, and the reference of all settings."""

from __future__ import annotations

import argparse

from ..config import render
from ..config.schema import ConfigError
from .console import EXIT_CONFIG, complain, print_line, refuse
from .load_config import load

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    if options.reference:
        print_line(render.reference().rstrip())
        return 0
    try:
        loaded = load(options)
    except ConfigError as error:
        return refuse(error.problems, EXIT_CONFIG)
    print_line(render.to_json(loaded) if options.json else render.to_toml(loaded).rstrip())
    complain(f"warning: {warning}" for warning in loaded.warnings)
    return 0
