"""Broker of the bulk process: sessions, stores and leases of its streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from harness.operations import run_to_end
from harness.payloads import key_of
from harness.service_calls import PART, Calls, broker_of, serving

from kvtier.server.bulk.broker import BulkBroker
from kvtier.server.bulk.messages import Begin, Caller, Committed, Detached, End, Granted, Refusal, ToChild
from kvtier.tiers.types import LeaseId

KEYS = [key_of(number) for number in range(4)]
OTHERS = [key_of(number) for number in range(4, 8)]


@dataclass
class Site:
    calls: Calls
    broker: BulkBroker
    sent: list[ToChild]

    def begin(self, number: int, target: int, *, push: bool, session: bytes = b"s") -> None:
        items = [] if push else [*range(len(KEYS))]
        self.broker.handle(Begin(number, Caller(session, 1, None, [], is_local=True), push, target, items))
        assert isinstance(self.sent.pop(), Granted)

    async def lease(self) -> LeaseId:
        run_to_end(self.calls.runtime.core.complete_store(self.calls.session, self.calls.store(KEYS)))
        return LeaseId((await self.calls.look_up(KEYS)).lease_id)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving() as calls:
        yield Site(calls, *broker_of(calls))


@pytest.mark.parametrize("expired", [False, True])
async def test_a_load_under_an_expired_lease_is_not_confirmed(
    site: Site, monkeypatch: pytest.MonkeyPatch, *, expired: bool
) -> None:
    """The lease has expired, and the core has not removed it yet."""
    lease = await site.lease()
    site.begin(1, lease, push=False)
    later = site.calls.runtime.now() + 3600 * expired
    monkeypatch.setattr(site.calls.runtime, "now", lambda: later)
    site.broker.handle(End(1, "OK", complete=True, nbytes=len(KEYS) * PART))
    if expired:
        (refusal,) = site.sent
        assert isinstance(refusal, Refusal)
        assert "has expired" in refusal.text
    else:
        assert site.sent == [Committed(1, completed=True)]


async def test_the_last_stream_completes_a_store(site: Site) -> None:
    """While another stream writes to the slots, the blocks are not readable."""
    store = site.calls.store(KEYS)
    for number in (1, 2):
        site.begin(number, store, push=True)
    total = len(KEYS) * PART
    for number, completed in ((1, False), (2, True)):
        site.broker.handle(End(number, "OK", complete=True, nbytes=total, ranges=[0, total]))
        assert site.sent.pop() == Committed(number, completed=completed)
    assert (await site.calls.look_up(KEYS)).prefix_hits == len(KEYS)


async def test_a_stream_counts_as_a_call(site: Site) -> None:
    """The call counts for its session, for the rate limit and for the time of the last call."""
    counted: list[Any] = []
    site.calls.registry.count_call = counted.append
    site.begin(1, site.calls.store(KEYS), push=True)
    assert [opened.core for opened in counted] == [site.calls.session]


async def test_the_end_of_a_session_ends_only_its_streams(site: Site) -> None:
    site.begin(1, site.calls.store(KEYS), push=True, session=b"ended")
    site.begin(2, site.calls.store(OTHERS), push=True, session=b"other")
    site.broker.end_streams_of_session(b"ended")
    assert [(type(message), message.stream) for message in site.sent] == [(Refusal, 1)]  # type: ignore[union-attr]


async def test_the_last_progress_of_a_refused_stream_counts(site: Site) -> None:
    """Another stream of the same client goes on behind it."""
    store = site.calls.store(KEYS)
    site.begin(1, store, push=True)
    site.broker.end_streams_of_store(store)
    site.broker.handle(Detached(1, PART, [0, PART]))
    assert list(site.calls.runtime.core.store(site.calls.session, store).received) == [(0, PART)]
