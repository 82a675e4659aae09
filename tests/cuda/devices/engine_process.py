"""An engine's process: exports KV tensors and runs commands from its standard input, one per line.

Arguments: the back end and the KV tensors (JSON). The first line of its output is its export.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from devices.backends import Backend, make_backend
from devices.kv import Kv
from kvtier.cuda.device.exports import export_blocks

EVENTS = 2


class EngineProcess:
    """One engine: its tensors, a compute stream and events."""

    def __init__(self, backend: Backend, kv: Kv) -> None:
        self.backend = backend
        self.driver = backend.driver
        self.kv = kv
        self.nbytes = [tensor.nbytes for tensor in kv.tensors(0)]
        self.addresses = self._allocate()
        self.stream = self.driver.create_stream()
        self.events = [self.driver.create_event(shared=True) for _ in range(EVENTS)]
        self.release: Callable[[], None] = lambda: None
        self.fill(0)

    def _allocate(self) -> list[int]:
        if not self.kv.carved:
            return [self.backend.allocate(nbytes) for nbytes in self.nbytes]
        start = self.backend.allocate(sum(self.nbytes) + 256) + 256
        return [start + sum(self.nbytes[:index]) for index in range(len(self.nbytes))]

    def export(self) -> str:
        groups = {0: (self.kv.layout(), self.addresses)}
        return export_blocks(self.driver, groups, events=self.events).to_bytes().hex()

    def fill(self, seed: int) -> str:
        """Other contents for all tensors."""
        for address, tensor in zip(self.addresses, self.kv.tensors(seed), strict=True):
            self.backend.write(address, tensor.tobytes())
        return "ok"

    def dump(self) -> str:
        pairs = zip(self.addresses, self.nbytes, strict=True)
        return b"".join(self.backend.read(address, nbytes) for address, nbytes in pairs).hex()

    def compute(self, event: int) -> str:
        """Starts compute that lasts until `finish`, and records an event after it."""
        self.release = self.backend.hold(self.stream)
        self.driver.record(self.events[event], self.stream)
        return "ok"

    def finish(self, seed: int) -> str:
        """Ends the compute, whose result are other contents."""
        self.fill(seed)
        self.release()
        return "ok"

    def free(self, index: int) -> str:
        self.backend.free(self.addresses[index])
        return "ok"


def main() -> None:
    name, kv = sys.argv[1:]
    fields = json.loads(kv)
    engine = EngineProcess(make_backend(name), Kv(tuple(fields.pop("shape")), **fields))
    print(engine.export(), flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        print(getattr(engine, command)(*map(int, numbers)), flush=True)


if __name__ == "__main__":
    main()
