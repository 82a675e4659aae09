"""Starts the bulk process when it is first needed, and again when it dies. Lives on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ...cuda.host.region import HostRegion
from ...protos.wire.attach import REQUEST_BYTES
from ..config.schema import Config
from ..process.child import Child, RestartBackoff
from ..telemetry.logs import get_logger
from .broker import BulkBroker
from .messages import Listening, Setup, ToChild, decode_from_child, encode

__all__ = ["SOCKET_SUFFIX", "BulkProcess"]

SOCKET_SUFFIX = ".bulk"
"""What the child's Unix socket is called more than the server's."""

_log = get_logger(__name__)

_QUIET_SECONDS = 1.0
"""Half of what a client gives a call: one that ends a store must not lose its session to a child that hangs."""


def _offers_plain(config: Config) -> bool:
    """Says whether bytes and calls may go over plain sockets: in the clear, with nothing but a session's id to vouch for them."""
    return config.bulk.tcp and config.tls.cert is None


class BulkProcess:
    """The child, if there is one. `close` ends it."""

    def __init__(
        self, region: HostRegion, config: Config, desk: BulkBroker, take_calls: Callable[[socket.socket, bytes], None]
    ) -> None:
        """`take_calls` is given each connection that a client made to the child for calls, and what came first on it."""
        self.arrivals = desk.arrivals
        self._region = region
        self._limits = config.limits
        self._settings = config.bulk
        self._offers_plain = _offers_plain(config)
        self._hosts = tuple(endpoint.host for endpoint in config.endpoints if not endpoint.is_unix)
        self._paths = tuple(f"{endpoint.path}{SOCKET_SUFFIX}" for endpoint in config.endpoints if endpoint.is_unix)
        tls = config.tls
        self._tls = (str(tls.cert), str(tls.key), str(tls.client_ca or "")) if tls.cert is not None else None
        self._desk = desk
        self._take_calls = take_calls
        self._task: asyncio.Task[None] | None = None
        self._child: Child | None = None
        self._listening = False
        self._port = self._plain_port = 0

    def where(self) -> tuple[int, int, str]:
        """Returns where streams are served, and starts the child: port for gRPC, for plain sockets, suffix of the Unix socket.

        0 and nothing where they are not, or not yet.
        """
        if self._task is None:
            # Not in the context of the call that is the first to ask: what the child says later is not its caller's.
            self._task = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())
        suffix = SOCKET_SUFFIX if self._paths else ""
        return (self._port, self._plain_port, suffix) if self._listening else (0, 0, "")

    async def quiet(self, store_id: int) -> None:
        """Ends the streams that write to a store; a child that does not let them end within a second is killed."""
        while events := self._desk.writing_to(store_id):
            try:
                await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), _QUIET_SECONDS)
            except TimeoutError:
                _log.error("the bulk process does not answer and is killed")
                if self._child is not None:
                    self._child.kill()
        await self._desk.writers.idle(store_id)

    async def close(self) -> None:
        """Ends the child and its sockets."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = RestartBackoff(most=10.0, good=30.0)
        while True:
            began = time.monotonic()
            try:
                await self._live()
            except (OSError, RuntimeError, msgspec.MsgspecError) as error:  # RuntimeError: no thread to be had
                _log.warning("bulk process failed", error=str(error))
            backoff.ended(time.monotonic() - began)
            _log.warning("bulk process has ended; streams go through the server", retry_seconds=backoff.remaining())
            await asyncio.sleep(backoff.remaining())

    async def _live(self) -> None:
        """One life of the child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        loop = asyncio.get_running_loop()
        with ours:
            with theirs:
                fds = [self._region.fd, theirs.fileno()]
                self._child = child = await Child.start("kvtier.server.bulk", [str(fd) for fd in fds], fds, self._take)
            ours.setblocking(False)
            loop.add_reader(ours, self._take_over, ours)
            try:
                await self._serve(child)
            finally:
                loop.remove_reader(ours)

    async def _serve(self, child: Child) -> None:
        try:
            self._say(self._setup())
            self._desk.connected(self._say)
            await child.hung_up()
        finally:
            self._child = None
            self._listening = False
            # First its death, then the news of it: from then on its slots are somebody else's.
            child.kill()
            await asyncio.shield(child.close(_QUIET_SECONDS))
            self._desk.disconnected()
            self._unlink()

    def _setup(self) -> Setup:
        return Setup(
            region_bytes=self._region.size_bytes,
            hosts=self._hosts,
            port=self._settings.grpc_port or self._port,
            any_port=not self._settings.grpc_port,
            plain=self._offers_plain,
            plain_port=self._settings.tcp_port or self._plain_port,
            any_plain_port=not self._settings.tcp_port,
            paths=self._paths,
            max_frame_bytes=self._limits.max_frame_bytes,
            max_message_bytes=self._limits.max_message_bytes,
            tls=self._tls,
        )

    def _unlink(self) -> None:
        for path in self._paths:
            with contextlib.suppress(OSError):
                Path(path).unlink()

    def _take_over(self, handover: socket.socket) -> None:
        """Takes a connection for calls from the child: its bytes need not pass through there."""
        try:
            request, descriptors, _, _ = socket.recv_fds(handover, REQUEST_BYTES, 1)
        except OSError as error:  # out of descriptors, for one: the client goes by gRPC
            _log.warning("cannot take over a connection", error=str(error))
            return
        if not request:
            asyncio.get_running_loop().remove_reader(handover)
        for descriptor in descriptors:
            self._take_calls(socket.socket(fileno=descriptor), request)

    def _take(self, _: dict[str, Any], payload: bytes) -> None:
        message = decode_from_child(payload)
        if isinstance(message, Listening):
            self._port, self._plain_port, self._listening = message.port, message.plain_port, True
            _log.info("bulk process serves", pid=self._child and self._child.pid, port=message.port)
        else:
            self._desk.take(message)

    def _say(self, message: ToChild) -> None:
        if self._child is not None:
            self._child.send({}, encode(message))
