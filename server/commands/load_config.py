"""Effective configuration of a command: its flags, the file and the environment."""

from __future__ import annotations

import argparse

from ..config.fields import SETTINGS
from ..config.loader import Loaded
from ..config.loader import load as load_sources

__all__ = ["load"]


def load(options: argparse.Namespace) -> Loaded:
    """Raises `ConfigError`."""
    flags = {key: value for key, value in vars(options).items() if key in SETTINGS}
    return load_sources(flags, file=options.config)
