"""Movers that start late, or not at all: calls go another way meanwhile, and no device keeps another one's place."""

from __future__ import annotations

from pathlib import Path

import pytest
from devices.kv import BLOCKS
from devices.service import Engine, Service, eventually, keys_of

from kvtier.client import DeviceUnavailable, StoreStatus

KEYS = keys_of(BLOCKS)
GRANTED = bytes([StoreStatus.GRANTED]) * BLOCKS


def test_a_mover_that_takes_long_to_start(tmp_path: Path) -> None:
    """In a server's next life: calls are told to go another way, the second at once; later they go over the mover."""
    service = Service(tmp_path, driver="devices.gated_driver:make_late")
    with service, Engine(service.server.endpoint, call=1).register() as engine:
        service.gate.close()
        service.server.restart()
        engine.client.wait_until_connected(20)
        with pytest.raises(DeviceUnavailable, match="starting"):
            engine.client.store_from_device(KEYS, range(BLOCKS))
        service.gate.open()
        with pytest.raises(DeviceUnavailable, match="starting"):
            engine.client.store_from_device(KEYS, range(BLOCKS))
        engine.client._operations._refused = None  # the time until the next attempt is over

        def stored() -> bool:
            try:
                return engine.client.store_from_device(KEYS, range(BLOCKS)) == GRANTED
            except DeviceUnavailable:
                engine.client._operations._refused = None
                return False

        eventually(stored)
        assert len(service.movers) == 1
