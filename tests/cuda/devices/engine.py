"""Handle of an engine's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from devices.kv import Kv
from kvtier.cuda.device.exports import DeviceExport

__all__ = ["CountingAfter", "Engine"]

_HERE = Path(__file__).parent.parent


class Engine:
    """A running engine and its `export`.

    Its contents are those of seed 0 until `fill` or `finish`.
    """

    def __init__(self, backend: str, kv: Kv) -> None:
        self.kv = kv
        arguments = [backend, json.dumps(asdict(kv))]
        path = os.pathsep.join([str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "devices.engine_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_HERE,
            env=os.environ | {"PYTHONPATH": path},
        )
        self.export = DeviceExport.from_bytes(bytes.fromhex(self._read()))

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> str:
        line = self._process.stdout.readline()
        assert line, "the engine's process has ended"
        return line.strip()

    def tell(self, command: str, *numbers: int) -> str:
        """Sends a command and waits for the answer."""
        self._process.stdin.write(" ".join([command, *map(str, numbers)]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def contents(self) -> bytes:
        return bytes.fromhex(self.tell("dump"))

    def expected(self, seed: int) -> bytes:
        """The contents after `fill` with that seed."""
        return b"".join(tensor.tobytes() for tensor in self.kv.tensors(seed))

    def kill(self) -> None:
        """SIGKILL, and waits. May be repeated."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()


class CountingAfter:
    """Counts how often a condition is polled."""

    def __init__(self, after: Callable[[], bool]) -> None:
        self.asked = 0
        self._after = after

    def __call__(self) -> bool:
        self.asked += 1
        return self._after()
