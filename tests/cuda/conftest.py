"""Fixtures for tests of devices: each back end, an engine's process, a region."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `devices` lies here, and not beside the rooms of all tests

from devices.backends import Backend, make_backend
from devices.engine import Engine
from devices.kv import Kv

from kvtier.cuda.errors import DeviceError
from kvtier.cuda.region import HostRegion

REGION_BYTES = 4 << 20


@pytest.fixture(params=["host", "fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A driver in the process of the test: shared memory's; CUDA's over a stand-in for libcuda; CUDA's over a GPU."""
    try:
        made = make_backend(request.param)
    except DeviceError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def region() -> Iterator[HostRegion]:
    """A host region, as a server has it."""
    with HostRegion.create(REGION_BYTES, name="kvtier-test") as made:
        made.back(0, REGION_BYTES)
        yield made


@pytest.fixture
def start_engine(backend: Backend, region: HostRegion) -> Iterator[Callable[[Kv], Engine]]:
    """Starts processes that export KV tensors, as engines do, and ends them."""
    engines: list[Engine] = []

    def start(kv: Kv) -> Engine:
        engines.append(Engine(backend.name, kv, region))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()
