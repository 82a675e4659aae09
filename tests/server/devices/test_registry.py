"""Registry of device memory: cancelled copies."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from harness.payloads import key_of
from harness.service_calls import serving

from kvtier.server.devices.copy_worker_client import CopyPlan
from kvtier.server.devices.registry import DeviceRegistry, Registration
from kvtier.server.rpc.own_copies import Writers


async def test_a_cancelled_call_cancels_its_copy() -> None:
    """The worker gets the message; the copy writes to the slots until the worker has ended it."""
    began, ended = asyncio.Event(), asyncio.Event()
    cancelled: list[tuple[int, int]] = []
    numbers: list[tuple[int, int]] = []

    async def copy(buffers: int, number: int, _: CopyPlan) -> None:
        numbers.append((buffers, number))
        began.set()
        await ended.wait()

    worker: Any = SimpleNamespace(copy=copy, cancel=lambda *copy: cancelled.append(copy))
    async with serving() as calls:
        writers, unused = Writers(calls.runtime), SimpleNamespace(on_close=[])
        devices = DeviceRegistry(calls.runtime, unused, driver="off", unavailable="")  # type: ignore[arg-type]
        store = calls.runtime.core.store(calls.session, calls.store([key_of(0)]))
        plan = CopyPlan(True, {}, 0, None, 0)
        registration = Registration(7, b"s", "", worker, SimpleNamespace(), 0)  # type: ignore[arg-type]
        call = asyncio.create_task(devices.copy(registration, plan, writers.writing(store)))
        await began.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert cancelled == numbers
        assert writers.busy(store.id)
        ended.set()
        await writers.idle(store.id)
