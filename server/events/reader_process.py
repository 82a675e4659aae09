"""Starts the process that serves readers, restarts it, and passes messages to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from ...tiers.core.event_log import event_scope
from ...tiers.secondary_tier import NamespaceId
from ..config.events import EventConfig
from ..process.child import Child, Restarts
from ..telemetry.downgrades import Downgrades
from ..telemetry.logs import get_logger
from .reader_keys import MAX_TENANTS, ReaderKeyFile
from .reader_sockets import ReaderSocket

__all__ = ["ReaderProcess"]

_log = get_logger(__name__)

_MODULE = "kvtier.server.events.readers"
_MAX_UNTAKEN = 64
"""Messages that the process has not taken yet. Each has at most 1 MiB."""
_KEYS_SECONDS = 1.0
_END_SECONDS = 1.0
_REMEDIES = {
    "": "see the log lines of this process",
    "priority": "permit the system call setpriority",
    "accept": "raise the number of open files of the server",
}
"""What an operator can do, by the subject of a downgrade of the process."""


class ReaderProcess:
    """The child process. All calls must come from the event loop."""

    def __init__(self, config: EventConfig, downgrades: Downgrades | None = None) -> None:
        """Opens the listening sockets. Raises PublisherError."""
        self._config = config
        downgrades = downgrades or Downgrades()
        self._restarts = Restarts("the process for readers of events", "events", _REMEDIES, downgrades)
        self._child: Child | None = None
        self._untaken = 0
        self._room = asyncio.Event()
        with contextlib.ExitStack() as opened:
            report = downgrades.reporter("events", "docs/events.md#publisher-of-the-server", subject="keys")
            self._keys = None if config.keys is None else ReaderKeyFile(config.keys, report)
            self._sockets = [
                opened.enter_context(contextlib.closing(ReaderSocket(address)))
                for address in (config.publish, config.replay)
                if address is not None
            ]
            self._opened = opened.pop_all()

    async def run(self, publish: Callable[[], Awaitable[None]]) -> None:
        """Runs the process, and for each of its lives `publish`, until it is cancelled.

        The process keeps the messages. So after its end the numbers begin at 0 again, and `publish`
        begins with all blocks, as after a restart of the server.
        """

        def ended(retry_seconds: float) -> str:
            _log.warning("the process for readers of events has ended", retry_seconds=retry_seconds)
            return "no events are published, because the process for their readers does not run"

        await self._restarts.run(partial(self._run_once, publish), ended, most=30.0, good=60.0)

    async def send(self, namespace: NamespaceId, topic: bytes, payload: bytes) -> None:
        """Sends a message about blocks of a namespace; waits while the process is busy."""
        while self._untaken >= _MAX_UNTAKEN:
            self._room.clear()
            await self._room.wait()
        if self._child is not None:
            self._untaken += 1
            self._child.send({"scope": event_scope(namespace).hex(), "topic": len(topic)}, topic + payload)

    def close(self) -> None:
        """Closes the sockets. Call it after the end of `run`."""
        self._opened.close()

    async def _run_once(self, publish: Callable[[], Awaitable[None]]) -> None:
        groups = [socket.filenos() for socket in self._sockets]
        fds = [fd for group in groups for fd in group]
        child = await Child.start(_MODULE, [",".join(map(str, group)) for group in groups], fds, self._take)
        tasks = []
        try:
            self._child, self._untaken = child, 0
            self._room.set()
            child.send(self._setup())
            self._restarts.serves()
            _log.info("events are published", address=self._config.publish, pid=child.pid)
            tasks = [asyncio.ensure_future(each) for each in (publish(), self._send_keys(child))]
            await child.disconnected()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._child = None
            await asyncio.shield(child.close(_END_SECONDS))

    def _setup(self) -> dict[str, Any]:
        return {
            "buffer": self._config.buffer,
            "buffers": 1 if self._keys is None else 1 + MAX_TENANTS,
            "max_readers": self._config.max_readers,
            "secret": "" if self._keys is None else self._keys.secret.hex(),
            # Before the process listens, because it would refuse readers.
            "keys": {} if self._keys is None else _as_text(self._keys.readers()),
        }

    async def _send_keys(self, child: Child) -> None:
        """Tells the process the keys of readers, also when they change."""
        known = None
        while self._keys is not None:
            readers = self._keys.readers()
            if readers != known:
                known = readers
                child.send({"keys": _as_text(readers)})
            await asyncio.sleep(_KEYS_SECONDS)

    def _take(self, header: dict[str, Any], _body: bytes) -> None:
        if not self._restarts.take(header):
            self._untaken -= 1
            self._room.set()


def _as_text(readers: Mapping[bytes, bytes | None]) -> dict[str, str | None]:
    return {key.hex(): None if scope is None else scope.hex() for key, scope in readers.items()}
