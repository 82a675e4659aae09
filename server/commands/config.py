"""`kvtier config`: the effective configuration, and the reference of all settings."""

from __future__ import annotations

import argparse

from ..config import render
from ..config.fields import SETTINGS
from ..config.loader import Loaded
from ..config.loader import load as load_sources
from ..config.schema import ConfigError
from .console import EXIT_CONFIG, complain, print_line, refuse

__all__ = ["load", "run"]


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


def load(options: argparse.Namespace) -> Loaded:
    """Returns the configuration for a command with these options. Raises `ConfigError`."""
    flags = {key: value for key, value in vars(options).items() if key in SETTINGS}
    return load_sources(flags, file=options.config)
