"""Limit of the gRPC requests that arrive at the same time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from harness.polling import async_wait_until

from kvtier.server.rpc import interceptor, receptions
from kvtier.server.rpc.receptions import Receptions

PATIENCE_SECONDS = 0.05


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
    """Returns how many receptions per caller end early, while a further call waits."""
    places, contexts, tasks = Receptions(), [], []
    for caller, count in shares.items():
        for _ in range(count):
            context: Any = Context()
            contexts.append((caller, context))
            tasks.append(asyncio.create_task(places.receive(context, caller)))
    late: Any = Context()
    await asyncio.sleep(PATIENCE_SECONDS)
    tasks.append(asyncio.create_task(places.receive(late, "late")))
    await async_wait_until(lambda: any(context.aborted for _, context in contexts))
    # If the place is not used, `_end_oldest` is called further times.
    await asyncio.sleep(4 * PATIENCE_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {caller: sum(c.aborted for name, c in contexts if name == caller) for caller in shares}


def test_a_caller_within_its_share_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are taken. Only the caller with many receptions gives one up, not the oldest."""
    monkeypatch.setattr(receptions, "_PATIENCE_SECONDS", PATIENCE_SECONDS)
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
