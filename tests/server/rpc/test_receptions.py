"""Limit of the gRPC requests that arrive at the same time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from kvtier.server.rpc import interceptor
from kvtier.server.rpc.receptions import Receptions


class Context:
    """A call whose request never arrives."""

    def __init__(self) -> None:
        self.aborted = False

    async def read(self) -> bytes:
        await asyncio.sleep(3600)
        return b""

    async def abort(self, *_: object) -> None:
        self.aborted = True
        raise asyncio.CancelledError


async def aborted_of(shares: dict[str, int]) -> dict[str, int]:
    """Returns how many receptions per caller end early, while further calls wait for a second."""
    receptions, contexts, tasks = Receptions(), [], []
    for caller, count in shares.items():
        for _ in range(count):
            context: Any = Context()
            contexts.append((caller, context))
            tasks.append(asyncio.create_task(receptions.receive(context, caller)))
    late: Any = Context()
    await asyncio.sleep(0.3)
    tasks.append(asyncio.create_task(receptions.receive(late, "late")))
    await asyncio.sleep(1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {caller: sum(c.aborted for name, c in contexts if name == caller) for caller in shares}


def test_a_caller_within_its_share_is_not_refused() -> None:
    """All places are taken. Only the caller with many receptions gives one up, not the oldest."""
    aborted = asyncio.run(aborted_of({"honest": 4, "other": 4, "third": 4, "fourth": 4, "greedy": 16}))
    assert aborted.pop("greedy") >= 1
    assert set(aborted.values()) == {0}


def test_callers_without_a_token_have_their_address() -> None:
    def address(peer: str) -> str:
        context: Any = SimpleNamespace(peer=lambda: peer)
        return interceptor._address_of(context)

    assert address("ipv4:10.0.0.1:5000") == address("ipv4:10.0.0.1:5001") == "ipv4:10.0.0.1"
    assert address("ipv6:[::1]:5000") == "ipv6:[::1]"
    assert address("unix:") == "unix:"
