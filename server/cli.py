"""The command `kvtier`: runs a subcommand and returns the exit code.

Each subcommand imports its own dependencies, so that `kvtier --help` starts fast.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from .commands.console import EXIT_FAILURE, refuse
from .commands.parser import new_parser

__all__ = ["main", "set_credentials"]

_MODULES = {"tiers": "status", "sessions": "status"}
"""Module of each command whose module has another name than the command."""
_OF_THE_SERVER = frozenset(
    {"grpc_health", "grpc_reflection", "lmdb", "msgspec", "prometheus_client", "rich", "shtab", "structlog"}
)
"""Packages that are missing if only the client is installed."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = new_parser().parse_args(arguments)
    set_credentials(options)
    module = _MODULES.get(options.command, options.command)
    try:
        code: int = importlib.import_module(f".commands.{module}", __package__).run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as in `kvtier config | head`
        _forget_output()
        return EXIT_FAILURE
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None or options.command == "serve":
            raise
        _forget_output()
        return refuse([f"the output cannot be written: {error.strerror}"], EXIT_FAILURE)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_THE_SERVER:
            raise
        return refuse(
            [f"{error}; this command needs the server's packages: pip install 'kvtier[server]'"], EXIT_FAILURE
        )
    return code


def set_credentials(options: argparse.Namespace) -> None:
    """Copies the credential flags into the environment. Connections read credentials from there."""
    from ..protos.endpoint import CREDENTIAL_VARIABLES

    for name in ("ca", "cert", "key", "token_file"):
        if getattr(options, name, None) is not None:
            os.environ[CREDENTIAL_VARIABLES[name]] = getattr(options, name)
            if name == "token_file":
                # The variable with the token itself would override the file.
                os.environ.pop(CREDENTIAL_VARIABLES["token"], None)


def _forget_output() -> None:
    """Discards buffered output, so that the interpreter's flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
