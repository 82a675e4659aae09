"""Runs the proxy until it is told to end."""

from __future__ import annotations

import logging
import time

import uvicorn

from .app import make_app
from .settings import parse_arguments

__all__ = ["main"]

GRACE_S = 30
"""For requests that are under way when the program is told to end."""


def main() -> int:
    """Reads the command line and serves; SIGTERM and SIGINT end it."""
    settings = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per request is the access log's
    uvicorn.run(
        make_app(settings, time.monotonic),
        host=settings.host,
        port=settings.port,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    return 0
