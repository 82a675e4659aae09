"""Starts the bulk process on first use and restarts it. Lives on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ...cuda.host.region import HostRegion
from ..config.schema import Config
from ..process.child import Child, Restarts
from ..rpc.listening_sockets import SocketError, bind_tcp
from ..telemetry.downgrades import Downgrades
from ..telemetry.logs import get_logger
from .broker import BulkBroker
from .messages import Listening, Ping, Pong, Setup, ToChild, decode_from_child, encode

__all__ = ["BulkProcess", "bind_streams"]

_log = get_logger(__name__)

_HANDOVER_BYTES = 16
_END_SECONDS = 1.0
"""Time for the child to end after its socket was closed; then it is killed."""
_TURN_AWAY_SECONDS = 0.005
_ROUND_SECONDS = 1.0
_SILENT_ROUNDS = 5
"""Number of pings, one after another, without an answer. Then the child is stuck. On a machine with
2 busy cores an answer took more than a second, and a kill ends the streams of all tenants. The
rounds end late if the event loop was delayed, so a delay is at most one of them."""
_DETACH_SECONDS = 30.0
"""Time after which a stream that does not detach from its slots is stuck."""
_OPEN_FILES = "raise the number of open files of the server"
_REMEDIES = {
    "": "see the log lines of the bulk process",
    "priority": "permit the system call setpriority",
    "accept": _OPEN_FILES,
    "thread": "raise the number of threads of the server",
    "calls": _OPEN_FILES,
    "pass": _OPEN_FILES,
    "take over": _OPEN_FILES,
}
"""What an operator can do, by the subject of a downgrade of streams."""


def bind_streams(config: Config) -> list[socket.socket]:
    """Returns listening TCP sockets on the hosts of `listen`. Raises `SocketError`."""
    hosts = [endpoint.host for endpoint in config.endpoints if not endpoint.is_unix and config.bulk.tcp]
    try:
        return bind_tcp(hosts, config.bulk.tcp_port)
    except OSError as error:
        where = f"bulk.tcp_port = {config.bulk.tcp_port}: cannot listen on {', '.join(hosts)}"
        raise SocketError(f"{where}: {error.strerror}") from error


class BulkProcess:
    """The child process, if it runs. `close` ends it."""

    def __init__(
        self,
        region: HostRegion,
        config: Config,
        broker: BulkBroker,
        take_calls: Callable[[socket.socket], None],
        listeners: Sequence[socket.socket] = (),
        downgrades: Downgrades | None = None,
    ) -> None:
        """`take_calls` gets the connections for calls that the child has accepted.

        `listeners`: TCP sockets with one port, which the caller closes after `close`.
        """
        self._region = region
        self._limits = config.limits
        tls = config.tls
        self._tls = (str(tls.cert), str(tls.key), str(tls.client_ca or "")) if tls.cert is not None else None
        self._broker = broker
        self._take_calls = take_calls
        self._task: asyncio.Task[None] | None = None
        self._child: Child | None = None
        self._handover: socket.socket | None = None
        """Connected to the child while the child serves."""
        self._restarts = Restarts("bulk process", "streams", _REMEDIES, downgrades)
        self._listeners = listeners
        self._port = listeners[0].getsockname()[1] if listeners else 0
        self._answers = 0
        """Number of `Pong` messages."""
        self._turn_away()

    def locate(self) -> int | None:
        """Starts the child if needed. Returns its TCP port (0 for none); None until it is ready."""
        if self._task is None:
            # In an empty context, because the task does not belong to the call that starts it.
            self._task = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())
        return self._port if self._handover is not None else None

    def serve_streams(self, connection: socket.socket, hello: bytes) -> bool:
        """Passes a duplicate of a Unix connection to the child; returns whether this succeeded."""
        if self._handover is None:
            return False
        try:
            socket.send_fds(self._handover, [hello], [connection.fileno()])
        except OSError as error:  # such as a full buffer; the client then uses gRPC
            text = f"a client's streams use the server, because it cannot pass a connection: {error}"
            self._restarts.report("pass", text)
            return False
        self._restarts.report("pass", "")
        return True

    async def end_writers(self, store_id: int) -> None:
        """Ends the streams that write to a store. Kills the child only if it is stuck."""
        loop = asyncio.get_running_loop()
        stuck_at, silent = loop.time() + _DETACH_SECONDS, 0
        while events := self._broker.end_streams_of_store(store_id):
            answers = self._answers
            self._send(Ping())
            try:
                # Not `gather`: a cancelled call would leave an exception that nothing retrieves.
                # Not `asyncio.timeout`: a call over a socket may run outside of a task.
                await asyncio.wait_for(_wait_for_all(events), _ROUND_SECONDS)
                stuck_at = loop.time() + _DETACH_SECONDS  # of streams that begin meanwhile
            except TimeoutError:
                silent = silent + 1 if self._answers == answers else 0
                if silent >= _SILENT_ROUNDS or loop.time() >= stuck_at:
                    _log.error("the bulk process does not answer and is killed")
                    if self._child is not None:
                        self._child.kill()
        await self._broker.writers.idle(store_id)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._stop_turning_away()

    def _turn_away(self) -> None:
        """Closes TCP connections until a child serves, so that clients use gRPC at once."""
        self._turns_away = True
        for listener in self._listeners:
            listener.setblocking(False)
            self._watch(listener)

    def _stop_turning_away(self) -> None:
        self._turns_away = False
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)

    def _watch(self, listener: socket.socket) -> None:
        if self._turns_away:
            asyncio.get_running_loop().add_reader(listener, self._close_next, listener)

    def _close_next(self, listener: socket.socket) -> None:
        """Closes one connection, and then none for a time, so that a flood costs nothing else."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        with contextlib.suppress(OSError):
            listener.accept()[0].close()
        loop.call_later(_TURN_AWAY_SECONDS, self._watch, listener)

    async def _run(self) -> None:
        def ended(retry_seconds: float) -> str:
            self._turn_away()
            _log.warning("bulk process has ended; streams go through the server", retry_seconds=retry_seconds)
            return "the bulk process does not run, so streams are slower"

        await self._restarts.run(self._run_once, ended, most=10.0, good=30.0)

    async def _run_once(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        loop = asyncio.get_running_loop()
        with ours:
            with theirs:
                self._stop_turning_away()
                pools, of_region = self._region.for_child
                fds = [theirs.fileno(), *(listener.fileno() for listener in self._listeners)]
                arguments, inherited = [pools, *map(str, fds)], [*fds, *of_region]
                self._child = child = await Child.start(
                    "kvtier.server.bulk.streams", arguments, inherited, partial(self._take, ours)
                )
            ours.setblocking(False)
            loop.add_reader(ours, self._take_over, ours)
            try:
                await self._serve(child, ours)
            finally:
                loop.remove_reader(ours)

    async def _serve(self, child: Child, handover: socket.socket) -> None:
        try:
            self._send(self._setup())
            self._broker.connected(self._send)
            await child.disconnected()
        finally:
            self._child = self._handover = None
            # The child must have ended before the broker frees the slots for other stores.
            child.kill()
            await asyncio.shield(child.close(_END_SECONDS))
            self._broker.disconnected()

    def _setup(self) -> Setup:
        return Setup(
            region_bytes=self._region.size_bytes,
            limits=self._limits,
            tls=self._tls,
        )

    def _take_over(self, handover: socket.socket) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(handover, _HANDOVER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:  # such as too many open files; the client then uses gRPC
            text = f"a client's calls use gRPC, because the server cannot take a connection: {error}"
            self._restarts.report("take over", text)
            return
        self._restarts.report("take over", "")
        if not message:
            asyncio.get_running_loop().remove_reader(handover)
        for descriptor in descriptors:
            self._take_calls(socket.socket(fileno=descriptor))

    def _take(self, handover: socket.socket, header: dict[str, Any], payload: bytes) -> None:
        if self._restarts.take(header):
            return
        message = decode_from_child(payload)
        if isinstance(message, Listening):
            self._handover = handover
            self._restarts.serves()
            _log.info("bulk process serves", pid=self._child and self._child.pid, port=self._port)
        elif isinstance(message, Pong):
            self._answers += 1
        else:
            self._broker.handle(message)

    def _send(self, message: ToChild) -> None:
        if self._child is not None:
            self._child.send({}, encode(message))


async def _wait_for_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        await event.wait()
