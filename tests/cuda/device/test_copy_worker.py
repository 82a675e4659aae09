"""The copy worker's process alone: its answers, and messages in a wrong order."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from devices.backends import HostBackend
from devices.kv import BLOCKS, JOINED, STEP, slots

from kvtier.cuda.device.exports import export_blocks
from kvtier.cuda.host.region import HostRegion
from kvtier.server.devices.copy_worker import EXIT_BROKEN
from kvtier.server.devices.plan_codec import pack_plan
from kvtier.server.process.child import Child

FAR = 1 << 62


@asynccontextmanager
async def worker(
    region: HostRegion, driver: str = "kvtier.cuda.testing.host_driver:HostDriver"
) -> AsyncIterator[Child]:
    text, fds = region.for_child
    arguments = [text, str(region.size_bytes), driver, "host"]
    child = await Child.start("kvtier.server.devices.copy_worker", arguments, fds)
    yield child
    await child.close(10)


def copy_of(number: int, groups: dict[int, Any], **fields: Any) -> tuple[dict[str, Any], bytes]:
    """A message that copies blocks out."""
    counts, payload = pack_plan(groups)
    header = {"op": "copy", "buffers": 1, "copy": number, "out": True, "after": None, "deadline": FAR}
    return header | {"groups": counts} | fields, payload


def talk(with_it: Callable[[Child], Awaitable[None]], region: HostRegion) -> int:
    """Runs `ask` with a copy worker and returns the worker's exit status."""

    async def run() -> int:
        async with worker(region) as child:
            await with_it(child)
        return await child.ended()

    return asyncio.run(run())


def test_messages_in_a_wrong_order(region: HostRegion) -> None:
    """A copy of closed or unopened blocks fails; cancelling and closing them again does nothing."""
    backend = HostBackend()
    addresses = [backend.allocate(tensor.nbytes) for tensor in JOINED.tensors(0)]
    for address, tensor in zip(addresses, JOINED.tensors(0), strict=True):
        backend.write(address, tensor.tobytes())
    export = export_blocks(backend.driver, {0: (JOINED.layout(), addresses)})

    async def script(child: Child) -> None:
        messages = child.messages()

        async def answer() -> dict[str, Any]:
            header, _ = await anext(messages)
            return header

        assert await answer() == {"op": "ready"}
        child.send({"op": "close", "buffers": 1})
        child.send({"op": "cancel", "buffers": 1, "copy": 1})
        child.send(*copy_of(1, {0: ([0], [0])}))
        assert (await answer())["cause"] == "closed"
        child.send({"op": "open", "buffers": 1}, export.to_bytes())
        assert await answer() == {"op": "opened", "buffers": 1, "events": False}
        child.send(*copy_of(2, {0: ([0, 5], [0, STEP])}))
        assert await answer() == {"op": "done", "copy": 2}
        child.send(*copy_of(3, {0: ([BLOCKS], [0])}))
        assert (await answer())["cause"] == "bad_plan"
        child.send(*copy_of(4, {1: ([0], [0])}))
        assert (await answer())["cause"] == "bad_export"
        child.send(*copy_of(5, {0: ([0], [2 * STEP])}, deadline=1))
        assert (await answer())["cause"] == "cancelled"
        child.send(*copy_of(6, {0: ([0], [2 * STEP])}, after=0))
        assert (await answer())["cause"] == "bad_export"
        child.send({"op": "open", "buffers": 2}, dataclasses.replace(export, device="another").to_bytes())
        assert (await answer())["cause"] == "no_device"
        child.send({"op": "close", "buffers": 1})
        assert await answer() == {"op": "closed", "buffers": 1}

    assert talk(script, region) == 0
    part = JOINED.parts(0)
    assert slots(region, [0, STEP, 2 * STEP], len(part[0])) == [part[0], part[5], bytes(len(part[0]))]
    backend.close()


def test_nonsense_ends_it(region: HostRegion) -> None:
    """An invalid message is a defect.

    The process ends, so the server knows that no copy is in progress.
    """

    async def script(child: Child) -> None:
        child.send({"op": "copy"})
        assert await asyncio.wait_for(child.ended(), 60) == 1

    assert talk(script, region) == 1


@pytest.mark.parametrize("when", ["opening", "copying"])
def test_a_broken_context_ends_it(
    region: HostRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """After a broken context there is no answer: copies may be in progress until the end."""
    program = (
        "from kvtier.cuda.testing.host_driver import HostDriver\n"
        "def make(device):\n    driver = HostDriver(device)\n    open_memory = driver.open_memory\n"
        "    def open_and_break(handle):\n        address = open_memory(handle)\n        driver.break_down('ECC')\n"
        "        return address\n    if {opening}:\n        driver.open_memory = open_and_break\n"
        "    else:\n        driver._pace = lambda: driver.break_down('ECC')\n    return driver\n"
    )
    (tmp_path / "breaking.py").write_text(program.format(opening=when == "opening"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    backend = HostBackend()
    addresses = [backend.allocate(tensor.nbytes) for tensor in JOINED.tensors(0)]
    export = export_blocks(backend.driver, {0: (JOINED.layout(), addresses)}).to_bytes()

    async def script() -> tuple[list[dict[str, Any]], int]:
        async with worker(region, "breaking:make") as child:
            child.send({"op": "open", "buffers": 1}, export)
            child.send(*copy_of(1, {0: ([0], [0])}))
            said = [header async for header, _ in child.messages()]
            return said, await child.ended()

    said, code = asyncio.run(script())
    assert code == EXIT_BROKEN
    assert [header["op"] for header in said] == ["ready", "opened"][: 1 if when == "opening" else 2]
    backend.close()
