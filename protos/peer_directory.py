"""Directory of the servers on other hosts that may be named as a source of blocks.

The operator lists `HOST:PORT` entries. An entry whose host is a DNS name, such as the name of a
headless service, stands for all addresses of this name. A thread resolves the names again and
again. Names that callers send are only compared with the directory, and never resolved.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from .endpoint import Endpoint, EndpointError, parse_endpoint

__all__ = ["PeerDirectory", "peer_entry"]

REFRESH_SECONDS = 10.0
"""Time between two resolutions of a name."""
KEEP_SECONDS = 300.0
"""For so long the addresses of a name are used if it can no longer be resolved."""

_log = logging.getLogger(__name__)


def peer_entry(text: str) -> Endpoint:
    """Returns an entry of the directory. Raises EndpointError if it is not `HOST:PORT`."""
    entry = parse_endpoint(text)
    if entry.is_unix or not entry.port:
        raise EndpointError(f"{text!r} must be HOST:PORT, with the port of the server")
    return Endpoint(host=_standard(entry.host), port=entry.port)


def resolve(host: str) -> frozenset[str]:
    """Returns all IP addresses of a name. Blocks. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return frozenset(str(address[0]) for *_, address in found)


class PeerDirectory:
    """Addresses that may be named as a source. Any thread may call `find`, which does no I/O."""

    def __init__(
        self,
        entries: Sequence[str],
        *,
        keep_seconds: float = KEEP_SECONDS,
        resolve_name: Callable[[str], Collection[str]] = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Resolves nothing yet; see `start` and `refresh`. Raises EndpointError."""
        listed = list(dict.fromkeys(map(peer_entry, entries)))
        self._fixed = frozenset(entry for entry in listed if _is_address(entry.host))
        self._named = [entry for entry in listed if entry not in self._fixed]
        self._keep_seconds = keep_seconds
        self._resolve = resolve_name
        self._clock = clock
        self._found: dict[str, tuple[tuple[str, ...], float]] = {}
        """Addresses of each name, and when they were resolved. Replaced as a whole."""
        self._failing: set[str] = set()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def __bool__(self) -> bool:
        """Whether the directory has entries."""
        return bool(self._fixed or self._named)

    def __len__(self) -> int:
        """Number of addresses that may be named now."""
        return len(self._fixed) + sum(len(self._addresses(entry.host)) for entry in self._named)

    def find(self, name: str) -> Endpoint | None:
        """Returns the server that `name` (HOST:PORT) means; None if no entry permits it.

        Its `tls_name` is the listed name, not the address.
        """
        try:
            asked = peer_entry(name)
        except (EndpointError, UnicodeError):
            return None
        if asked in self._fixed:
            return asked
        for entry in self._named:
            addresses = self._addresses(entry.host)
            if asked == entry and addresses:
                return replace(entry, host=addresses[0], tls_name=entry.host)
            if asked.port == entry.port and asked.host in addresses:
                return replace(asked, tls_name=entry.host)
        return None

    def start(self, refresh_seconds: float = REFRESH_SECONDS) -> None:
        """Starts a thread that resolves the names, now and then every `refresh_seconds`."""
        if not self._named:
            return

        def run() -> None:
            while True:
                self.refresh()
                if self._closing.wait(refresh_seconds):
                    return

        self._thread = threading.Thread(target=run, name="kvtier-peer-names", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Resolves all names once. Blocks. If a name cannot be resolved, its addresses remain."""
        for host in dict.fromkeys(entry.host for entry in self._named):
            try:
                addresses = tuple(sorted(map(_standard, self._resolve(host))))
            except (OSError, UnicodeError) as error:
                if host not in self._failing:
                    _log.warning("kvtier: cannot resolve the peers %s: %s", host, error)
                self._failing.add(host)
                continue
            self._failing.discard(host)
            self._found = {**self._found, host: (addresses, self._clock())}

    def close(self) -> None:
        """Ends the thread. Waits only briefly, because a resolution may hang."""
        self._closing.set()
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):
                self._thread.join(0.1)

    def _addresses(self, host: str) -> tuple[str, ...]:
        addresses, resolved_at = self._found.get(host, ((), 0.0))
        return addresses if self._clock() - resolved_at < self._keep_seconds else ()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _standard(host: str) -> str:
    """Returns a host in the form in which equal hosts are equal texts."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.rstrip(".").lower()
