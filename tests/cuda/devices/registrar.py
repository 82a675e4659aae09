"""A recording registrar, instead of a GPU's driver."""

from __future__ import annotations

import threading
from pathlib import Path

from kvtier.cuda.host.pinning import PinError

__all__ = ["RecordingRegistrar"]


class RecordingRegistrar:
    """A registrar. `hold` blocks its calls; `error` makes them fail."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.threads: set[str] = set()
        self.hold = threading.Event()
        self.hold.set()
        self.error: PinError | None = None

    def register(self, address: int, nbytes: int) -> None:
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        assert self.hold.wait(60)
        if self.error is not None:
            raise self.error
        assert address not in self.registered
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        """The memory must still be mapped."""
        maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        assert any(int(start, 16) <= address < int(end, 16) for start, end in maps)
        del self.registered[address]
