"""Copy workers that start late or not at all.

Calls use another transport, and other devices are not blocked.
"""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from devices.backends import HostBackend
from devices.caller import PART, Caller, refusal_reason
from devices.gated_driver import Gate
from devices.kv import BLOCKS, JOINED
from devices.service import Engine, Service, keys_of
from harness.polling import wait_until

from kvtier.client import DeviceUnavailable, StoreStatus
from kvtier.cuda.device.exports import DeviceExport, export_blocks
from kvtier.cuda.host.region import HostRegion
from kvtier.server.devices import registry as registry_module
from kvtier.server.devices.registry import DeviceRegistry
from kvtier.server.refused import Refused

KEYS = keys_of(BLOCKS)
GRANTED = bytes([StoreStatus.GRANTED]) * BLOCKS


@pytest.mark.slow
def test_a_copy_worker_that_starts_slowly(tmp_path: Path) -> None:
    """After a server restart, calls use another transport at first, and the copy worker later."""
    service = Service(tmp_path, driver="devices.gated_driver:make_late")
    with service, Engine(service.server.endpoint, call=4).register() as engine:
        service.gate.close()
        service.server.restart()
        engine.client.wait_until_connected(60)
        with pytest.raises(DeviceUnavailable, match="starting"):
            engine.client.store_from_device(KEYS, range(BLOCKS))
        service.gate.open()
        with pytest.raises(DeviceUnavailable, match="starting"):
            engine.client.store_from_device(KEYS, range(BLOCKS))
        engine.client._operations._refused = None  # the next attempt is due

        def stored() -> bool:
            try:
                return engine.client.store_from_device(KEYS, range(BLOCKS)) == GRANTED
            except DeviceUnavailable:
                engine.client._operations._refused = None
                return False

        wait_until(stored)
        assert len(service.copy_workers) == 1


def test_memory_of_another_host_starts_nothing(tmp_path: Path) -> None:
    """Memory of another host is refused without starting a process."""
    with Service(tmp_path) as service, closing(Caller(service, "raw")) as caller:
        request = caller.registration()
        request.origin.boot_id = "another"
        assert refusal_reason(caller.calls.RegisterDeviceBuffers, request) == "DEVICE_UNAVAILABLE"
        assert service.copy_workers == []


def registry_of(region: HostRegion) -> DeviceRegistry:
    """A registry with real copy workers, whose sessions never end."""
    runtime: Any = SimpleNamespace(region=region)
    sessions: Any = SimpleNamespace(on_close=[], check=lambda _: None)
    return DeviceRegistry(runtime, sessions, driver="devices.gated_driver:make", unavailable="")


def test_missing_devices_use_up_no_limit(region: HostRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for missing devices do not use up the limit of devices with a process."""
    monkeypatch.setattr(registry_module, "_MAX_DEVICES", 2)
    for name, value in Gate(tmp_path / "gate").environment.items():
        monkeypatch.setenv(name, value)
    for folder in Path(__file__).parents[1:3]:
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    backend = HostBackend()
    addresses = [backend.allocate(tensor.nbytes) for tensor in JOINED.tensors(0)]
    export = export_blocks(backend.driver, {0: (JOINED.layout(), addresses)})

    async def script() -> None:
        registry = registry_of(region)
        try:
            for number in range(3):
                with pytest.raises(Refused, match="no_device"):
                    await register(registry, export, f"missing {number}")
            for device in ("a", "b"):
                await register(registry, export, device)
            with pytest.raises(Refused, match="too_many"):
                await register(registry, export, "c")
        finally:
            await registry.close()

    asyncio.run(asyncio.wait_for(script(), 60))
    backend.close()


async def register(registry: DeviceRegistry, export: DeviceExport, device: str) -> None:
    """Registers an engine's memory, as if on ``device``, in a new session."""
    session: Any = SimpleNamespace(id=device.encode(), tenant="", namespace=SimpleNamespace(part_bytes=[PART]))
    await registry.register(session, dataclasses.replace(export, device=device))
