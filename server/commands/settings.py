"""The configuration that the flags of a command make up, with what the file and the environment say."""

from __future__ import annotations

import argparse

from ..settings import SETTINGS
from ..sources import Loaded
from ..sources import load as load_sources

__all__ = ["load"]


def load(options: argparse.Namespace) -> Loaded:
    """Returns the effective configuration. Raises `ConfigError`."""
    flags = {key: value for key, value in vars(options).items() if key in SETTINGS}
    return load_sources(flags, file=options.config)
