"""`kvtier bench --break-even`: reads the flags, has it measured, and shows the result.

What is measured is what an engine does, so it is done by the client (`client/breakeven`): all that this room knows of that one,
and only when the command is run.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from rich.console import Console

from ...protos.endpoint import EndpointError, client_endpoint
from ..config.units import parse_size
from . import admin_client
from .bench_report import show, to_json
from .console import EXIT_FAILURE, EXIT_UNREACHABLE, EXIT_USAGE, print_line, refuse

if TYPE_CHECKING:
    from ...client import breakeven

__all__ = ["run"]

_LEAST_ROUNDS = 3
"""Fewer say nothing of how sure the answer is."""
_BLOCK_TOKENS = 16


class UsageError(Exception):
    """The flags are no question; one line."""


def run(options: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    from ...client import breakeven

    try:
        with Console(stderr=True).status("measuring"):  # seen on terminals only
            report = breakeven.measure(_plan(options))
    except (UsageError, EndpointError) as error:
        return refuse([f"{error}"], EXIT_USAGE)
    except (admin_client.UnreachableError, breakeven.PeerUnreachable) as error:
        return refuse([f"{error}"], EXIT_UNREACHABLE)
    except (admin_client.AdminClientError, breakeven.BreakEvenError) as error:
        return refuse([f"{error}"], EXIT_FAILURE)
    except KeyboardInterrupt:
        return refuse(["interrupted; nothing is left on the server"], EXIT_FAILURE)
    print_line(to_json(report)) if options.json else show(report)
    return 0


def _plan(options: argparse.Namespace) -> breakeven.MeasurementPlan:
    """Returns what to measure, of flags that are all right, and of a server that answers."""
    from ...client import breakeven

    if not options.break_even:
        raise UsageError("say what to measure: --break-even")
    _at_least(_LEAST_ROUNDS, "--rounds", options.rounds)
    _at_least(1, "--max-tokens", options.max_tokens)
    max_bytes, compute, geometry = _size("--max-bytes", options.max_bytes), _compute(options), _geometry(options)
    endpoint = client_endpoint(options.endpoint)
    return breakeven.MeasurementPlan(
        endpoint=f"{endpoint}",
        status=admin_client.ask_status(endpoint, options.timeout),
        compute=compute,
        transport=options.transport,
        timeout=options.timeout,
        geometry=geometry,
        model=options.model,
        max_bytes=max_bytes,
        max_tokens=options.max_tokens,
        rounds=options.rounds,
    )


def _compute(options: argparse.Namespace) -> breakeven.PrefillEngine | float:
    from ...client import breakeven

    rate: float | None = options.prefill_tokens_per_s
    if (options.engine is None) == (rate is None):
        raise UsageError("say how fast prompts are computed: either --engine or --prefill-tokens-per-s")
    if rate is not None:
        if not 0 < rate < math.inf:
            raise UsageError(f"--prefill-tokens-per-s {rate:g}: must be more than 0")
        return 1 / rate
    try:
        return breakeven.PrefillEngine(options.engine)
    except ValueError as error:
        raise UsageError(f"--engine: {error}") from None


def _geometry(options: argparse.Namespace) -> breakeven.Geometry | None:
    from ...client import breakeven

    if options.kv_bytes_per_token is None:
        if options.block_tokens is not None:
            raise UsageError("--block-tokens goes with --kv-bytes-per-token")
        return None
    if options.model is not None:
        raise UsageError("either --model or --kv-bytes-per-token")
    block_tokens = _BLOCK_TOKENS if options.block_tokens is None else options.block_tokens
    _at_least(1, "--block-tokens", block_tokens)
    return breakeven.Geometry.given(_size("--kv-bytes-per-token", options.kv_bytes_per_token), block_tokens)


def _size(flag: str, text: str) -> int:
    try:
        return _at_least(1, flag, parse_size(text))
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from None


def _at_least(least: int, flag: str, value: int) -> int:
    if value < least:
        raise UsageError(f"{flag} {value}: must be {least} or more")
    return value
