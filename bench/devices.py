"""Benchmark of the CUDA IPC transport, compared with one large copy to and from pinned memory.

    python -m bench.devices [--driver host] [--json FILE]

Without a GPU only `--driver host` works. It tests the benchmark; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.client import Client, Group, KvBuffers, Namespace, Timeouts, make_key
from kvtier.cuda.device.cuda_driver import CudaDriver
from kvtier.cuda.device.device_errors import DeviceError
from kvtier.cuda.device.driver_contract import Driver
from kvtier.cuda.device.layout import BlockLayout, LayoutRun
from kvtier.cuda.host.pinning import PIN_CHUNK_BYTES
from kvtier.cuda.host.region import HostRegion
from kvtier.cuda.testing.host_driver import HostDriver

from .machine import facts
from .measure import interleave, rate
from .report import Report
from .service import Service

__all__ = ["main"]

LAYERS = 32
FRAGMENTS = {"16 KiB": 16 << 10, "64 KiB": 64 << 10, "256 KiB": 256 << 10, "2 MiB": 2 << 20}
"""Bytes of a block per layer: 64 KiB is K and V of 16 tokens, 8 heads of 128, 2 bytes each."""
MOVED_BYTES = 512 << 20
REGION_BYTES = 2 << 30
ROUNDS = 9


class Device:
    """A device and a pinned region, to measure the limit."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.region = HostRegion.create(MOVED_BYTES, "kvtier-bench")
        self.region.back(0, MOVED_BYTES)
        for start in range(0, MOVED_BYTES, PIN_CHUNK_BYTES):
            driver.register(self.region.address + start, PIN_CHUNK_BYTES)
        self.address = self.allocate(MOVED_BYTES)
        self._stream = driver.create_stream()
        self._event = driver.create_event()

    def allocate(self, nbytes: int) -> int:
        if isinstance(self.driver, HostDriver):
            address = self.driver.allocate(nbytes)
            ctypes.memset(address, 1, nbytes)
            return address
        assert isinstance(self.driver, CudaDriver)
        with self.driver.in_context() as cuda:
            return int(cuda.call("cuMemAlloc", nbytes))

    def large_copy(self, *, out: bool) -> float:
        """Returns the seconds to copy the whole region in its pinned chunks."""
        host = [self.region.address + start for start in range(0, MOVED_BYTES, PIN_CHUNK_BYTES)]
        device = [self.address + start for start in range(0, MOVED_BYTES, PIN_CHUNK_BYTES)]
        sizes = [PIN_CHUNK_BYTES] * len(host)
        started = time.perf_counter()
        self.driver.copy(self._stream, host if out else device, device if out else host, sizes)
        self.driver.record(self._event, self._stream)
        self.driver.wait(self._event)
        return time.perf_counter() - started


class Engine:
    """An engine that has one tensor per layer on the device and stores new keys in each round."""

    def __init__(self, service: Service, device: Device, fragment: int) -> None:
        self.blocks = MOVED_BYTES // fragment // LAYERS
        runs = tuple(LayoutRun(0, layer * self.blocks * fragment, fragment, fragment) for layer in range(LAYERS))
        self.cpu_seconds: list[float] = []
        self._buffers = KvBuffers(device.driver, {0: (BlockLayout(self.blocks, runs), [device.address])})
        namespace = Namespace(f"devices {fragment}", "uint8", (Group(LAYERS * fragment, 16),))
        timeouts = Timeouts(connect=30, call=30, device=60)
        self.client = Client(service.unix, namespace=namespace, transport="cuda_ipc", timeouts=timeouts)
        self.client.wait_until_connected()
        self.client.register_kv_buffers(self._buffers)

    def keys(self, number: int) -> list[bytes]:
        return [make_key(f"{number} {block}".encode().ljust(32), 0) for block in range(self.blocks)]

    def store(self, number: int) -> float:
        """Returns the seconds to store all blocks, including the calls."""
        return self._timed(self.client.store_from_device, self.keys(number), range(self.blocks))

    def load(self, number: int) -> float:
        """Returns the seconds to load the blocks of a round, including the calls."""
        return self._timed(self.client.load_to_device, self.keys(number), range(self.blocks))

    def _timed(self, call: Callable[..., object], keys: Sequence[bytes], blocks: Sequence[int]) -> float:
        cpu, started = time.process_time(), time.perf_counter()
        call(keys, blocks)
        seconds = time.perf_counter() - started
        self.cpu_seconds.append(time.process_time() - cpu)
        return seconds

    def close(self) -> None:
        self.client.close()
        self._buffers.close()


def measure(report: Report, service: Service, device: Device) -> None:
    device.large_copy(out=True)
    for name, fragment in FRAGMENTS.items():
        engine = Engine(service, device, fragment)
        _measure_one(report, device, engine, name)
        engine.close()


def _measure_one(report: Report, device: Device, engine: Engine, name: str) -> None:
    engine.store(0)
    engine.cpu_seconds.clear()
    seconds = interleave(
        ROUNDS,
        {
            "D2H": lambda _: device.large_copy(out=True),
            "H2D": lambda _: device.large_copy(out=False),
            "store": lambda number: engine.store(number + 1),
            "load": lambda number: engine.load(number + 1),
        },
    )
    for direction, row in (("D2H", "store"), ("H2D", "load")):
        limit = f"{direction} one copy, beside {name}"
        report.add(limit, rate(MOVED_BYTES, seconds[direction]), "GB/s")
        report.add(f"{row} {name} fragments", rate(MOVED_BYTES, seconds[row]), "GB/s", limit)
    milliseconds = statistics.median(engine.cpu_seconds) * 1e3
    report.add(f"engine's CPU time per call of {engine.blocks:,} blocks of {LAYERS} fragments", milliseconds, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.devices")
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    try:
        driver: Driver = CudaDriver() if options.driver == "cuda" else HostDriver()
    except DeviceError as error:
        parser.exit(1, f"no device to measure: {error}\n")
    setting = "auto" if options.driver == "cuda" else "kvtier.cuda.testing.host_driver:HostDriver"
    report = Report()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name:
        about = facts(Path(name)) | {"device": f"{driver.device}{' (no GPU)' if options.driver == 'host' else ''}"}
        with Service(Path(name), REGION_BYTES, config=f'devices = {{driver = "{setting}"}}') as service:
            service.start()
            measure(report, service, Device(driver))
    report.show(about)
    if options.json:
        report.write_json(options.json, about)


if __name__ == "__main__":
    main()
