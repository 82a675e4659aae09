"""Child processes of the server, for work that may crash or hold the GIL for long.

A child runs a module of this package with the same interpreter. It has a socket to the server and
inherits the given descriptors. The server logs the child's standard error, each line with the level
that the child gave it. The kernel kills the child when the server ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from ...protos.backoff import Backoff
from ...tiers.storage.service_signals import start_module
from ..telemetry.downgrades import Downgrades, Feature
from ..telemetry.logs import get_logger
from .child_main import SIZES_BYTES, pack, read_sizes, split_level, unpack

__all__ = ["Child", "Restarts"]

_log = get_logger(__name__)

_STDERR_LINE_BYTES = 64 << 10


class Restarts:
    """Keeps a child running, and shows its downgrades as those of a feature."""

    def __init__(self, name: str, feature: Feature, remedies: Mapping[str, str], downgrades: Downgrades | None) -> None:
        """`remedies`: what an operator can do, by subject; "" if the child does not run."""
        self._name = name
        self._feature: Feature = feature
        self._remedies = remedies
        self._downgrades = downgrades or Downgrades()

    async def run(
        self, run_once: Callable[[], Awaitable[None]], ended: Callable[[float], str], most: float, good: float
    ) -> None:
        """Runs the child again and again until it is cancelled.

        `run_once` returns or raises when the child has ended. Then `ended` gets the seconds until
        the next start, and returns what is absent until then. Each run of less than `good` seconds
        doubles these seconds, from 0.1 up to `most`.
        """
        backoff = Backoff(0.1, most)
        while True:
            began = time.monotonic()
            try:
                await run_once()
                cause = "it ended"
            except (OSError, RuntimeError, ValueError) as error:  # such as no thread available
                cause = str(error)
                _log.warning(f"{self._name} failed", error=cause)
            now = time.monotonic()
            backoff.ended(now, was_good=now - began >= good)
            self.report("", f"{ended(backoff.remaining(now))}: {cause}", is_logged=False)
            await asyncio.sleep(backoff.remaining(now))

    def serves(self) -> None:
        """Ends the downgrades of the child before."""
        for subject in self._remedies:
            self.report(subject, "")

    def take(self, header: Mapping[str, Any]) -> bool:
        """Records a report of `Channel.slower`; returns whether it is one. Raises `ValueError`."""
        if "slower" not in header:
            return False
        subject, cause = str(header.get("subject")), str(header["slower"])
        if subject not in self._remedies:
            raise ValueError(f"{subject!r} is not a subject of reports")
        self.report(subject, cause, is_logged=False)
        return True

    def report(self, subject: str, cause: str, *, is_logged: bool = True) -> None:
        """Begins a downgrade, or ends it if `cause` is empty."""
        remedy = self._remedies[subject]
        self._downgrades.report(self._feature, cause, remedy, subject=subject, is_logged=is_logged)


class Child:
    """A running child, created by `start`. All calls must come from the event loop."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self.pid = process.pid
        self.name = name
        self._process = process
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter  # without this reference the transport would close
        self._transport: asyncio.WriteTransport
        self._disconnected: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: Sequence[str] = (),
        fds: Sequence[int] = (),
        take: Callable[[dict[str, Any], bytes], None] | None = None,
    ) -> Self:
        """Runs a module with the socket's descriptor and `arguments`. The child inherits `fds`.

        `take` gets each message of the child. Without `take`, iterate over `messages`. Call `start`
        on a thread that lives as long as the server, because the kernel kills the child when the
        calling thread ends. Raises `OSError`.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = start_module(module, [str(theirs.fileno()), *arguments], [theirs.fileno(), *fds])
        except BaseException:
            ours.close()
            raise
        child = cls(process, module.rpartition(".")[2])
        await child._connect(ours, take)
        return child

    async def _connect(self, connection: socket.socket, take: Callable[[dict[str, Any], bytes], None] | None) -> None:
        loop = asyncio.get_running_loop()
        try:
            threading.Thread(target=self._reap, args=(loop,), name=f"kvtier-reap-{self.name}", daemon=True).start()
        except RuntimeError as error:  # no thread available
            connection.close()
            self._process.kill()
            self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()
            raise OSError(errno.EAGAIN, f"{self.name}: {error}") from None
        if take is None:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=connection)
            self._transport = self._writer.transport
        else:
            self._disconnected = disconnected = loop.create_future()
            self._transport, _ = await loop.create_unix_connection(
                lambda: _Receiver(take, self._on_invalid, disconnected), sock=connection
            )
        self._tasks.append(loop.create_task(self._log_stderr()))

    @property
    def running(self) -> bool:
        """True until the event loop has learned that the child has ended."""
        return not self._ended.done()

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Sends a message without waiting. Does nothing if the child has ended."""
        if not self._transport.is_closing():
            self._transport.write(pack(header, payload))

    async def messages(self) -> AsyncIterator[tuple[dict[str, Any], bytes]]:
        """Yields messages until the child closes the socket or sends an invalid message."""
        try:
            while True:
                header_bytes, payload_bytes = read_sizes(await self._reader.readexactly(SIZES_BYTES))
                yield unpack(await self._reader.readexactly(header_bytes + payload_bytes), header_bytes)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except ValueError as error:
            self._on_invalid(error)

    async def disconnected(self) -> None:
        """Waits until a child with `take` has closed the socket or sent an invalid message."""
        assert self._disconnected is not None
        await asyncio.shield(self._disconnected)

    def _on_invalid(self, error: Exception) -> None:
        _log.error("a child process sent an invalid message", child=self.name, error=str(error))
        self.kill()

    async def ended(self) -> int:
        """Waits until the child has ended; returns the exit code, or -N if signal N killed it."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self, grace: float) -> None:
        """Closes the socket, so that the child ends. Kills it if it still runs after `grace` s."""
        self._transport.close()
        try:
            await asyncio.wait_for(self.ended(), grace)
        except TimeoutError:
            _log.warning("a child process did not end and is killed", child=self.name, pid=self.pid)
            self.kill()
            await self.ended()
        finally:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._on_end, code)

    def _on_end(self, code: int) -> None:
        # The socket stays open, because the child's last messages may not have been read yet.
        if not self._ended.done():
            self._ended.set_result(code)

    async def _log_stderr(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_STDERR_LINE_BYTES)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._process.stderr)
        try:
            while line := await _line_of(reader):
                level, text = split_level(line.decode(errors="replace").rstrip())
                if text:
                    _log.log(level, "output of a child process", child=self.name, pid=self.pid, text=text)
        finally:
            transport.close()


class _Receiver(asyncio.Protocol):
    """Parser of messages; needs fewer turns of the event loop than a task that reads a stream."""

    def __init__(
        self,
        take: Callable[[dict[str, Any], bytes], None],
        on_invalid: Callable[[Exception], None],
        ended: asyncio.Future[None],
    ) -> None:
        self._take = take
        self._on_invalid = on_invalid
        self._ended = ended
        self._received = bytearray()

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while (message := self._next()) is not None:
                self._take(*message)
        except ValueError as error:
            self._on_invalid(error)
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _next(self) -> tuple[dict[str, Any], bytes] | None:
        received = self._received
        if len(received) < SIZES_BYTES:
            return None
        header_bytes, payload_bytes = read_sizes(bytes(received[:SIZES_BYTES]))
        end = SIZES_BYTES + header_bytes + payload_bytes
        if len(received) < end:
            return None
        body = bytes(memoryview(received)[SIZES_BYTES:end])
        del received[:end]
        return unpack(body, header_bytes)

    def _end(self) -> None:
        self._received.clear()
        if not self._ended.done():
            self._ended.set_result(None)


async def _line_of(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError:  # the line is longer than the limit
        return await reader.read(_STDERR_LINE_BYTES) or b"\n"
