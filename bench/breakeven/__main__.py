"""Break-even benchmark: number of tokens from which a KV transfer is faster than recomputation.

    python -m bench.breakeven [--endpoint ADDRESS] (--engine URL | --prefill-tokens-per-s N)

It acts as an engine of a running server, times prompts of a prefill engine, and proposes
`kv_recompute_threshold`. At its end it removes the blocks that it stored on the server.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from rich.console import Console

from kvtier.client import KVTierError, NotConnected
from kvtier.protos.endpoint import EndpointError, client_endpoint
from kvtier.server.cli import set_credentials
from kvtier.server.commands import admin_client
from kvtier.server.commands.arguments import add_endpoint
from kvtier.server.commands.console import EXIT_FAILURE, EXIT_UNREACHABLE, EXIT_USAGE, print_line, refuse
from kvtier.server.config.units import parse_size

from .compute import PrefillEngine
from .errors import BreakEvenError, PeerUnreachable
from .geometry import Geometry
from .measure import MeasurementPlan, measure
from .report import show, to_json

__all__ = ["main"]

_MIN_ROUNDS = 3
"""Minimum number of rounds. Fewer rounds give no confidence interval."""
_BLOCK_TOKENS = 16


class UsageError(Exception):
    """Error in the flags, with a one-line message."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    options = _parser().parse_args(arguments)
    set_credentials(options)
    try:
        with Console(stderr=True).status("measuring"):  # visible only on terminals
            report = measure(_plan(options))
    except (UsageError, EndpointError) as error:
        return refuse([f"{error}"], EXIT_USAGE)
    except (NotConnected, PeerUnreachable) as error:
        return refuse([f"{error}"], EXIT_UNREACHABLE)
    except (KVTierError, BreakEvenError) as error:
        return refuse([f"{error}"], EXIT_FAILURE)
    except KeyboardInterrupt:
        return refuse(["interrupted; nothing is left on the server"], EXIT_FAILURE)
    print_line(to_json(report)) if options.json else show(report)
    return 0


def _plan(options: argparse.Namespace) -> MeasurementPlan:
    _at_least(_MIN_ROUNDS, "--rounds", options.rounds)
    _at_least(1, "--max-tokens", options.max_tokens)
    max_bytes, compute, geometry = _size("--max-bytes", options.max_bytes), _compute(options), _geometry(options)
    endpoint = client_endpoint(options.endpoint)
    return MeasurementPlan(
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


def _compute(options: argparse.Namespace) -> PrefillEngine | float:
    rate: float | None = options.prefill_tokens_per_s
    if (options.engine is None) == (rate is None):
        raise UsageError("the speed of prefill is missing: give either --engine or --prefill-tokens-per-s")
    if rate is not None:
        if not 0 < rate < math.inf:
            raise UsageError(f"--prefill-tokens-per-s {rate:g}: must be more than 0")
        return 1 / rate
    try:
        return PrefillEngine(options.engine)
    except ValueError as error:
        raise UsageError(f"--engine: {error}") from None


def _geometry(options: argparse.Namespace) -> Geometry | None:
    if options.kv_bytes_per_token is None:
        if options.block_tokens is not None:
            raise UsageError("--block-tokens needs --kv-bytes-per-token")
        return None
    if options.model is not None:
        raise UsageError("give either --model or --kv-bytes-per-token")
    block_tokens = _BLOCK_TOKENS if options.block_tokens is None else options.block_tokens
    _at_least(1, "--block-tokens", block_tokens)
    return Geometry.given(_size("--kv-bytes-per-token", options.kv_bytes_per_token), block_tokens)


def _size(flag: str, text: str) -> int:
    try:
        return _at_least(1, flag, parse_size(text))
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from None


def _at_least(least: int, flag: str, value: int) -> int:
    if value < least:
        raise UsageError(f"{flag} {value}: must be {least} or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.breakeven", description=(__doc__ or "").split("\n\n")[0])
    add_endpoint(parser)
    transports = ("auto", "shm", "tcp", "grpc")
    parser.add_argument(
        "--transport", choices=transports, default="auto", help="transport (auto: shm if the server is on this host)"
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        default=4096,
        help="maximum length of prefixes and prompts in tokens (4096)",
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=7, help="number of measurements per length (7)")
    parser.add_argument(
        "--max-bytes",
        metavar="SIZE",
        default="256MiB",
        help="maximum number of bytes to store on the server, at most an eighth of its CPU tier (256MiB)",
    )
    size = parser.add_argument_group("size of KV; by default that of the connected engine")
    size.add_argument(
        "--kv-bytes-per-token",
        metavar="SIZE",
        help="KV bytes of one token on one rank, for all layers; for example 128KiB",
    )
    size.add_argument("--block-tokens", metavar="N", type=int, help="number of tokens per block (16)")
    size.add_argument("--model", metavar="NAME", help="model of the engine, if several engines are connected")
    speed = parser.add_argument_group("speed of prefill, one of")
    speed.add_argument(
        "--engine", metavar="URL", help="OpenAI API of the prefill engine, for example http://127.0.0.1:8000"
    )
    speed.add_argument(
        "--prefill-tokens-per-s", metavar="N", type=float, help="known rate of prefill, instead of --engine"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
