"""Runs the proxy until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import time

import uvicorn

from .app import make_app
from .settings import parse_arguments

__all__ = ["main"]

GRACE_S = 30
"""Seconds for which the program waits for requests in flight before it ends."""


def main() -> int:
    """Parses the command line and serves until SIGTERM or SIGINT."""
    settings = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    uvicorn.run(
        make_app(settings, time.monotonic),
        host=settings.host,
        port=settings.port,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    return 0
