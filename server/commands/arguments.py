"""Arguments of several commands: the parser class, types of values, flags of calls to a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ...protos.spelling import did_you_mean

__all__ = ["DAY_SECONDS", "CommandParser", "add_connection", "add_endpoint", "count", "seconds"]

DAY_SECONDS = 86_400
_MAX_COUNT = (1 << 32) - 1

Number = TypeVar("Number", int, float)


class CommandParser(argparse.ArgumentParser):
    """Parser whose errors name the nearest command, option or choice."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(
                f"unknown argument {unknown[0]}{did_you_mean(unknown[0].partition('=')[0], self._option_string_actions)}"
            )
        return found, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        """Writes a text. Unlike the base class, raises `OSError` if the output is lost."""
        (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            hint = did_you_mean(f"{value}", choices) or f"; choose from {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"unknown choice {value!r}{hint}")


def _read(kind: Callable[[str], Number], text: str, wanted: str, valid: Callable[[Number], bool]) -> Number:
    try:
        value = kind(text)
    except (ValueError, OverflowError):
        value = None
    if value is None or not valid(value):
        raise argparse.ArgumentTypeError(f"must be {wanted}, not {text!r}")
    return value


def seconds(most: float) -> Callable[[str], float]:
    """Returns a parser of times above 0 and up to `most` seconds. It refuses NaN."""
    return lambda text: _read(float, text, f"more than 0 and at most {most:g} seconds", lambda value: 0 < value <= most)


def count(least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `least` to the largest number of a uint32 field."""
    wanted = f"a whole number from {least} to {_MAX_COUNT}"
    return lambda text: _read(int, text, wanted, lambda value: least <= value <= _MAX_COUNT)


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every command that calls a running server."""
    parser.add_argument(
        "--endpoint",
        metavar="ADDRESS",
        help="unix:PATH or HOST:PORT (default: KVTIER_ENDPOINT, otherwise this user's socket)",
    )
    add_connection(parser)


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for credentials, the time limit of a call, and JSON."""
    parser.add_argument("--ca", metavar="FILE", help='CA certificates of the server, or "system", for TLS (KVTIER_CA)')
    parser.add_argument("--cert", metavar="FILE", help="client certificate (KVTIER_CERT)")
    parser.add_argument("--key", metavar="FILE", help="private key of the client certificate (KVTIER_KEY)")
    parser.add_argument("--token-file", metavar="FILE", help="file that contains a token (KVTIER_TOKEN_FILE)")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds(DAY_SECONDS),
        default=5.0,
        help="maximum time to wait for an answer (default: 5)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
