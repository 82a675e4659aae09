"""Process of LMCache's server, for vLLM on the CPU.

Without a server, LMCache does not work with vLLM on the CPU: it logs "No supported cpu connector
found", and each lookup waits for 3 s.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["LmcacheServer", "server_settings"]

PATIENCE = 60.0
"""Maximum seconds for the start of the server, and for its end."""


def server_settings(host_bytes: int, chunk_tokens: int | None) -> list[str]:
    """Returns the flags of the server. ``chunk_tokens`` None: the default of 256 tokens.

    The server allocates all memory at the start, as kvtier's server does. In transfer mode `auto`
    the engine's worker copies.
    """
    flags = ["--l1-size-gb", f"{host_bytes / 2**30}", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    flags += ["--supported-transfer-mode", "auto", "--disable-observability"]
    return flags if chunk_tokens is None else [*flags, "--chunk-size", str(chunk_tokens)]


class LmcacheServer:
    """`lmcache server` as a process. As with kvtier, workers copy into shared memory."""

    def __init__(self, command: Path, directory: Path, settings: Sequence[str]) -> None:
        self._log = directory / "lmcache.log"
        self._directory = directory
        self.port, self._health_port = _free_port(), _free_port()
        self._command = [
            *(str(command), "server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self._health_port)),
            *("--shm-name", f"kvtier-bench-{os.getpid()}", *settings),
        ]

    def __enter__(self) -> Self:
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=self._directory
            )
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._health_port}/healthcheck", timeout=2).close()
            except (urllib.error.URLError, OSError) as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(self._log.read_text(errors="replace")) from error
                time.sleep(0.1)
            else:
                return

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
