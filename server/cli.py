"""The command `kvtier`: runs a subcommand and returns the exit code.

Each subcommand imports its own dependencies, so that `kvtier --help` starts fast.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from .commands.console import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    forget_output,
    is_lost_output,
    prepare_streams,
    refuse,
)
from .commands.parser import new_parser

__all__ = ["main", "set_credentials"]

_MODULES = {"tiers": "status", "sessions": "status"}
"""Module of each command whose module has another name than the command."""
_OF_THE_SERVER = frozenset(
    {"grpc_health", "grpc_reflection", "lmdb", "msgspec", "prometheus_client", "rich", "shtab", "structlog"}
)
"""Packages that are missing if only the client is installed."""


def main(arguments: Sequence[str] | None = None) -> int:
    prepare_streams()
    command = ""
    try:
        try:
            options = new_parser().parse_args(arguments)
            command = options.command
            set_credentials(options)
            if command != "serve":  # which sets it before its import of gRPC, too
                # Log lines of gRPC would mix with the output.
                os.environ.setdefault("GRPC_VERBOSITY", "NONE")
            module = _MODULES.get(command, command)
            code: int = importlib.import_module(f".commands.{module}", __package__).run(options)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as in `kvtier config | head`
        forget_output()
        return EXIT_FAILURE
    except OSError as error:
        if not is_lost_output(error) or command == "serve":
            raise
        forget_output()
        return refuse([f"the output cannot be written: {error.strerror}"], EXIT_FAILURE)
    except UnicodeEncodeError as error:
        if command == "serve":
            raise
        return refuse([f"not UTF-8, so it cannot be sent to a server: {error.object!r}"], EXIT_USAGE)
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
