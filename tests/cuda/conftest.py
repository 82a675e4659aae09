"""Fixtures of device tests: each back end, an engine's process, a region."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # makes the package `devices` importable

from devices.backends import Backend, make_backend
from devices.engine import Engine
from devices.kv import Kv

from kvtier.cuda.device.copies import EngineBlocks, Tuning
from kvtier.cuda.device.device_errors import Cause, DeviceError
from kvtier.cuda.device.handles import OpenHandles
from kvtier.cuda.host.region import HostRegion

REGION_BYTES = 4 << 20


@pytest.fixture(params=["host", "fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A driver in the test's process.

    Over shared memory, CUDA over a fake libcuda, or CUDA over a GPU.
    """
    try:
        made = make_backend(request.param)
    except DeviceError as error:
        if request.param != "gpu" and error.cause is not Cause.NO_BINDINGS:
            raise  # the fake needs the package, and nothing else
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with HostRegion.create(REGION_BYTES, name="kvtier-test") as made:
        made.back(0, REGION_BYTES)
        yield made


@pytest.fixture
def start_engine(backend: Backend) -> Iterator[Callable[[Kv], Engine]]:
    """Starts processes that export KV tensors, as engines do."""
    engines: list[Engine] = []

    def start(kv: Kv) -> Engine:
        engines.append(Engine(backend.name, kv))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()


@pytest.fixture
def handles(backend: Backend) -> OpenHandles:
    return OpenHandles(backend.driver)


@pytest.fixture
def open_blocks(backend: Backend, handles: OpenHandles, region: HostRegion) -> Iterator[Callable[..., EngineBlocks]]:
    """Opens engines' blocks."""
    opened: list[EngineBlocks] = []

    def open_them(engine: Engine, **tuning: object) -> EngineBlocks:
        limits = Tuning(**tuning)  # type: ignore[arg-type]
        opened.append(EngineBlocks(backend.driver, handles, region, engine.export, limits))
        return opened[-1]

    yield open_them
    for blocks in opened:
        with contextlib.suppress(DeviceError):
            blocks.close()


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool
