"""Starts the bulk process when it is first needed, and again when it dies. Lives on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from ...cuda.region import HostRegion
from ..config import Config
from ..logs import get_logger
from .desk import BulkDesk
from .messages import Listening, Reader, Setup, ToChild, decode_from_child, encode

__all__ = ["SOCKET_SUFFIX", "BulkProcess"]

SOCKET_SUFFIX = ".bulk"
"""What the child's Unix socket is called more than the server's."""

_log = get_logger(__name__)

_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 10.0
_STEADY_SECONDS = 30.0
"""A child that lived so long is started again at once."""
_QUIET_SECONDS = 2.0
_RECEIVE_BYTES = 256 << 10


class BulkProcess:
    """The child, if there is one. `close` ends it."""

    def __init__(self, region: HostRegion, config: Config, desk: BulkDesk) -> None:
        self.arrivals = desk.arrivals
        self._region = region
        self._config = config
        self._hosts = tuple(endpoint.host for endpoint in config.endpoints if not endpoint.is_unix)
        self._paths = tuple(f"{endpoint.path}{SOCKET_SUFFIX}" for endpoint in config.endpoints if endpoint.is_unix)
        self._desk = desk
        self._task: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening = False
        self._port = 0

    @property
    def pid(self) -> int | None:
        """The child's process id; None where there is none."""
        return self._process.pid if self._process is not None else None

    def where(self) -> tuple[int, str]:
        """Returns port and suffix of the socket where streams are served, 0 and nothing while they are not; starts the child."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return (self._port, SOCKET_SUFFIX if self._paths else "") if self._listening else (0, "")

    async def quiet(self, store_id: int) -> None:
        """Waits until the child writes to no slot of a store any more: at most two seconds, then it is killed."""
        while events := self._desk.writing_to(store_id):
            try:
                await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), _QUIET_SECONDS)
            except TimeoutError:
                _log.error("the bulk process does not answer and is killed")
                self._kill()

    async def close(self) -> None:
        """Ends the child and its sockets."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        delay = _FIRST_RETRY_SECONDS
        while True:
            began = loop.time()
            try:
                await self._live()
            except (OSError, msgspec.MsgspecError, subprocess.SubprocessError) as error:
                _log.warning("bulk process failed", error=str(error))
            delay = _FIRST_RETRY_SECONDS if loop.time() - began > _STEADY_SECONDS else delay
            _log.warning("bulk process has ended; streams go through the server meanwhile", retry_seconds=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_SECONDS)

    async def _live(self) -> None:
        """One life of the child."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = self._spawn(theirs.fileno())
            reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            self._bury()
            raise
        try:
            limits, log = self._config.limits, self._config.log
            self._say(
                Setup(
                    self._region.size_bytes,
                    self._hosts,
                    self._port,
                    self._paths,
                    limits.max_frame_bytes,
                    limits.max_message_bytes,
                    log.level,
                    log.format,
                )
            )
            self._desk.connected(self._say)
            await self._listen(reader)
        finally:
            self._listening = False
            self._writer.close()
            # First the death, then the news of it: from then on its slots are somebody else's.
            self._bury()
            self._desk.disconnected()

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kvtier.server.bulk", str(descriptor), str(self._region.fd)]
        return subprocess.Popen(  # noqa: S603 - our own text; vfork, some milliseconds
            command, stdin=subprocess.DEVNULL, pass_fds=(descriptor, self._region.fd)
        )

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        messages = Reader()
        while data := await reader.read(_RECEIVE_BYTES):
            for text in messages.feed(data):
                message = decode_from_child(text)
                if isinstance(message, Listening):
                    self._port, self._listening = message.port, True
                    _log.info("bulk process serves", pid=self.pid, port=message.port)
                else:
                    self._desk.take(message)

    def _say(self, message: ToChild) -> None:
        if self._writer is not None:
            self._writer.write(encode(message))

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _bury(self) -> None:
        """Makes sure that the child is dead. SIGKILL does not wait, and neither does this for long."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        for path in self._paths:
            with contextlib.suppress(OSError):
                Path(os.fspath(path)).unlink()
