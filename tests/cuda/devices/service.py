"""A server with copy workers over the host back end.

Engines in the test's process and in a child process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from harness.server_process import MIB, ServerProcess

from devices.backends import Backend, HostBackend
from devices.gated_driver import Gate
from devices.kv import BLOCKS, JOINED, Kv
from kvtier.client import Client, Group, KvBuffers, Namespace, Timeouts, make_key

__all__ = ["Engine", "KilledEngine", "Service", "keys_of", "namespace_of"]

_CUDA_TESTS = Path(__file__).parent.parent
_TESTS = _CUDA_TESTS.parent


def namespace_of(kv: Kv) -> Namespace:
    return Namespace("device", "uint16", (Group(kv.layout().part_bytes, 16),))


def keys_of(count: int, salt: str = "") -> list[bytes]:
    return [make_key(f"{salt}block {number}".encode().ljust(32, b"."), 0) for number in range(count)]


class Service:
    """A server whose copy workers hold copies at ``gate``."""

    def __init__(self, directory: Path, *, region: int = 8 * MIB, driver: str = "devices.gated_driver:make") -> None:
        self.gate = Gate(directory / "gate")
        self.server = ServerProcess(directory, region=region, config=f'[devices]\ndriver = "{driver}"')
        path = [str(_CUDA_TESTS), str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.server._environment |= self.gate.environment | {"PYTHONPATH": os.pathsep.join(path)}

    @property
    def copy_workers(self) -> list[int]:
        """Pids of the copy workers."""
        return [pid for pid in _children(self.server.pid) if "devices.copy_worker" in _command(pid)]

    def open_allocations(self, pid: int) -> int:
        """Number of mappings of engines' memory in a copy worker."""
        return sum("kvtier-device" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.open()
        self.server.close()


def _children(parent: int) -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            pids.append(int(path.parent.name))
    return pids


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


class Engine:
    """An engine in this process.

    Tensors in shared memory, a compute stream, a client with registered buffers.
    """

    def __init__(
        self,
        endpoint: str,
        kv: Kv = JOINED,
        *,
        transport: str = "cuda_ipc",
        call: float = 20.0,
        device: float = 30.0,
        backend: Backend | None = None,
    ) -> None:
        self.kv = kv
        self.backend = backend or HostBackend()
        self._owns_backend = backend is None
        self.nbytes = [tensor.nbytes for tensor in kv.tensors(0)]
        self.addresses = self._allocate()
        self.fill(0)
        self.stream = self.backend.driver.create_stream()
        self.buffers = KvBuffers(self.backend.driver, {0: (kv.layout(), self.addresses)}, events=4)
        timeouts = Timeouts(connect=60, call=call, device=device)
        way: Any = transport
        self.client = Client(endpoint, namespace=namespace_of(kv), transport=way, timeouts=timeouts)

    def _allocate(self) -> list[int]:
        if not self.kv.carved:
            return [self.backend.allocate(nbytes) for nbytes in self.nbytes]
        start = self.backend.allocate(sum(self.nbytes) + 256) + 256
        return [start + sum(self.nbytes[:index]) for index in range(len(self.nbytes))]

    def register(self) -> Self:
        self.client.register_kv_buffers(self.buffers)
        return self

    def fill(self, seed: int) -> None:
        """Writes other contents to all tensors."""
        for address, tensor in zip(self.addresses, self.kv.tensors(seed), strict=True):
            self.backend.write(address, tensor.tobytes())

    def clear(self) -> None:
        for address, nbytes in zip(self.addresses, self.nbytes, strict=True):
            self.backend.write(address, bytes(nbytes))

    def contents(self) -> bytes:
        pairs = zip(self.addresses, self.nbytes, strict=True)
        return b"".join(self.backend.read(address, nbytes) for address, nbytes in pairs)

    def expected(self, seed: int) -> bytes:
        """The contents after `fill` with that seed."""
        return b"".join(tensor.tobytes() for tensor in self.kv.tensors(seed))

    def stored(self, keys: list[bytes]) -> list[bytes]:
        """The server's bytes of these keys, loaded by the shm transport."""
        buffers = [bytearray(self.kv.layout().part_bytes) for _ in keys]
        assert self.client.load(keys, buffers) == len(keys)
        return [bytes(buffer) for buffer in buffers]

    def close(self) -> None:
        self.client.close()
        self.buffers.close()
        if self._owns_backend:
            self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class KilledEngine:
    """A child process that makes one device call, to be killed in mid-call."""

    def __init__(self, endpoint: str, call: str) -> None:
        path = [str(_CUDA_TESTS), str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "devices.service", endpoint, call],
            cwd=_CUDA_TESTS,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        """SIGKILL, and waits. May be repeated."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def main() -> None:
    """The main program of `KilledEngine`."""
    endpoint, call = sys.argv[1:]
    with Engine(endpoint) as engine:
        engine.register()
        getattr(engine.client, call)(keys_of(BLOCKS), range(BLOCKS))


if __name__ == "__main__":
    main()
