"""Status page: static files that the metrics endpoint serves, and security headers of its answers.

The page polls `status.json`. The content security policy allows only files of this server, and no
inline scripts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

from ...protos.v1.admin_pb2 import GetStatusResponse
from .status import to_json

__all__ = ["SECURITY_HEADERS", "AsyncStatus", "StatusPage", "read_on_loop"]

AsyncStatus: TypeAlias = Callable[[], Coroutine[Any, Any, GetStatusResponse]]
_READ_SECONDS = 2.0

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class StatusPage:
    """Files of the page, and the status as JSON. `status` is called on HTTP threads."""

    def __init__(self, status: Callable[[], GetStatusResponse]) -> None:
        self._status = status
        self._files = {f"/{file.name}": (_TYPES[file.suffix], file.read_bytes()) for file in _FOLDER.iterdir()}
        self._files["/"] = self._files.pop("/index.html")

    def file(self, path: str) -> tuple[str, bytes] | None:
        return self._files.get(path)

    def status_json(self) -> bytes:
        """Returns the JSON of `kvtier status --json`. Raises what `status` raises."""
        return to_json(self._status()).encode()


def read_on_loop(loop: asyncio.AbstractEventLoop, status: AsyncStatus) -> GetStatusResponse:
    """Builds a status on the event loop, for another thread. Raises `TimeoutError`."""
    found = asyncio.run_coroutine_threadsafe(status(), loop)
    try:
        return found.result(_READ_SECONDS)
    except TimeoutError:
        found.cancel()
        raise
