"""Command line of the router."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence

import uvicorn

from .app import Target, make_app
from .routing import Policy

__all__ = ["main", "parse_arguments", "parse_target"]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line. Exits the program if the command line is invalid."""
    parser = argparse.ArgumentParser(
        prog="kv_aware_router",
        description="Sends each request to the engine whose kvtier server has most of the prompt's blocks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--engine",
        action="append",
        type=parse_target,
        required=True,
        metavar="URL,events=ADDRESS[,replay=ADDRESS]",
        help="an engine, and the addresses `events.publish` and `events.replay` of its kvtier server; "
        "repeat the option for each engine",
    )
    add("--policy", choices=[policy.value for policy in Policy], default=Policy.PREFIX.value, help="choice of engines")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on")
    return parser.parse_args(arguments)


def parse_target(text: str) -> Target:
    """Parses the value of `--engine`. Raises argparse.ArgumentTypeError."""
    url, *options = text.split(",")
    given = {name: value for name, _, value in (option.partition("=") for option in options)}
    if not url.startswith(("http://", "https://")) or not given.get("events") or set(given) - {"events", "replay"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not like http://HOST:PORT,events=ADDRESS,replay=ADDRESS")
    return url.rstrip("/").removesuffix("/v1"), (given["events"], given.get("replay"))


def main() -> int:
    """Serves until SIGTERM or SIGINT."""
    options = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    app = make_app(options.engine, Policy(options.policy), time.monotonic)
    uvicorn.run(app, host=options.host, port=options.port, server_header=False, timeout_graceful_shutdown=30)
    return 0
