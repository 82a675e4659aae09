"""`kvtier serve`: runs the server."""

from __future__ import annotations

import argparse
import os

from ..config.schema import ConfigError
from ..telemetry import logs
from .config import load
from .console import EXIT_CONFIG, refuse

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    try:
        loaded = load(options)
    except ConfigError as error:
        return refuse(error.problems, EXIT_CONFIG)
    logs.configure(loaded.config.log)
    for warning in loaded.warnings:
        logs.get_logger(__name__).warning(warning)
    from ..app import EXIT_LEFT_BEHIND, serve

    try:
        code = serve(loaded.config)
    finally:
        logs.flush()
    if code == EXIT_LEFT_BEHIND:
        os._exit(code)  # a normal exit would unmap memory that a thread may be writing to
    return code
