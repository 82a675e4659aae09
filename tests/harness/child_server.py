"""A server as a child process: what the servers of shared tiers have in common."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from harness.signals import stop

__all__ = ["BucketServer", "ChildServer", "program_of"]


def program_of(name: str, folders: Sequence[tuple[str, str]]) -> str | None:
    """Returns a program's path: of the first of these packages and their folders, or of PATH."""
    places = []
    for package, folder in folders:
        found = importlib.util.find_spec(package)
        places += [f"{place}/{folder}" for place in (found and found.submodule_search_locations) or ()]
    return shutil.which(name, path=os.pathsep.join([*places, os.environ.get("PATH", "")]))


class ChildServer:
    """Server that subclasses start as `_process`."""

    _process: subprocess.Popen[bytes] | None = None

    def freeze(self, *, frozen: bool) -> None:
        assert self._process
        if frozen:
            stop(self._process.pid)
        else:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills the server with SIGKILL. May be repeated."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class BucketServer(ChildServer, ABC):
    """Server of an object store."""

    @abstractmethod
    def client(self) -> Any:
        """Returns a store of `obstore`, with long time limits."""

    def paths(self) -> list[str]:
        """Returns the paths of all objects, ascending."""
        import obstore

        return sorted(entry["path"] for chunk in obstore.list(self.client()) for entry in chunk)

    def clear(self) -> None:
        import obstore

        if paths := self.paths():
            obstore.delete(self.client(), paths)
