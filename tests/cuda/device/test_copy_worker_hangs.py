"""A driver call that hangs.

The copy worker is killed, and the next registration starts another one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from devices.backends import HostBackend
from devices.kv import JOINED

from kvtier.cuda.device.exports import export_blocks
from kvtier.cuda.host.region import HostRegion
from kvtier.server.devices import copy_worker_client
from kvtier.server.devices.copy_worker_client import CopyWorkerClient
from kvtier.server.refused import Refused

_PROGRAM = """
import pathlib
from harness.polling import wait_until
from kvtier.cuda.testing.host_driver import HostDriver

class Stuck(HostDriver):
    def {call}(self, argument):
        wait_until(lambda: not pathlib.Path({flag!r}).exists(), 3600)
        return super().{call}(argument)
"""


@asynccontextmanager
async def hanging_copy_worker(region: HostRegion) -> AsyncIterator[CopyWorkerClient]:
    """A copy worker with a driver call that hangs while a file exists."""
    worker = CopyWorkerClient("host", "stuck:Stuck", region, lambda: None)
    try:
        yield worker
    finally:
        await worker.stop()


@pytest.mark.parametrize("call", ["open_memory", "close_memory"])
def test_a_call_that_hangs(region: HostRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """An open call is refused and a close call ends when the worker is killed.

    A new process serves the next registration.
    """
    flag = tmp_path / "flag"
    (tmp_path / "stuck.py").write_text(_PROGRAM.format(call=call, flag=str(flag)))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    backend = HostBackend()
    addresses = [backend.allocate(tensor.nbytes) for tensor in JOINED.tensors(0)]
    export = export_blocks(backend.driver, {0: (JOINED.layout(), addresses)})

    async def script() -> None:
        async with hanging_copy_worker(region) as worker:
            await worker.open(1, export)
            flag.touch()
            with monkeypatch.context() as impatient:
                impatient.setattr(copy_worker_client, "_HANDLES_SECONDS", 0.3)
                await hang(worker, opening=call == "open_memory")
            flag.unlink()
            await worker.open(3, export)
            await worker.close(3)

    asyncio.run(asyncio.wait_for(script(), 60))
    backend.close()


async def hang(worker: CopyWorkerClient, *, opening: bool) -> None:
    """Makes the hanging call and checks that the process was killed."""
    child = worker._child
    if opening:
        other = HostBackend()
        addresses = [other.allocate(tensor.nbytes) for tensor in JOINED.tensors(0)]
        with pytest.raises(Refused, match="has ended"):
            await worker.open(2, export_blocks(other.driver, {0: (JOINED.layout(), addresses)}))
        other.close()
    else:
        await worker.close(1)
    assert not child.running
    assert worker._child is None
