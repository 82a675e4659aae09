"""The part that all remote tiers have, at a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from contracts.shared_tier_in_memory import SharedTierInMemory, memory_tier
from contracts.tier import CORRUPT, DONE, SPACE, content, empty, full, key
from harness.memory_store import MemoryStore, StoreClient

from kvtier.tiers.remote.circuit_breaker import FAILURES, MAX_PROBE_SECONDS, PROBE_SECONDS, CircuitBreaker
from kvtier.tiers.remote.limits import MAX_AVOIDED, AvoidedNames, ByteBudget
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.remote_tier import RemoteTier
from kvtier.tiers.remote.value_codec import name_of

pytestmark = pytest.mark.usefixtures("no_leaks")


class TestMemoryTier(SharedTierInMemory):
    def make_tier(self, limits: RemoteLimits) -> RemoteTier:
        return memory_tier(self.memory, limits)


def test_avoided_names_are_forgotten() -> None:
    """After their time, and the oldest ones if there are too many."""
    now = 0.0
    avoided = AvoidedNames(60.0, lambda: now)
    avoided.add([b"first", b"again"])
    avoided.add([b"again", *(b"%d" % number for number in range(MAX_AVOIDED - 1))])
    assert [name in avoided for name in (b"first", b"again", b"0")] == [False, True, True]
    now = 60.0
    assert b"again" not in avoided


def test_a_stored_block_is_sent_once() -> None:
    """A server asks first which blocks the store has, and sends only the others."""
    store = MemoryStore()
    first, second = memory_tier(store), memory_tier(store)
    blocks = [full(key(number), content(number, (5000,))) for number in range(4)]
    assert first.store(blocks[:3]) == [DONE] * 3
    before = store.written_bytes
    assert second.store(blocks) == [DONE] * 4
    assert store.written_bytes - before < 2 * 5000


def test_a_small_budget_makes_small_calls() -> None:
    """The blocks of one call fit into the budget."""
    store = MemoryStore()
    tier = memory_tier(store, RemoteLimits(in_flight_bytes=20_000))
    blocks = [full(key(number), content(number, (5000,))) for number in range(12)]
    assert tier.store(blocks) == [DONE] * 12
    assert store.calls == 2 * 3, "an EXISTS and a SET for every four blocks"


def test_a_good_value_survives_the_deletion_of_a_damaged_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server may replace the damaged value before this server deletes it."""
    store = MemoryStore()
    tier, name = memory_tier(store), name_of(SPACE, key(1))
    tier.store([full(key(1), [b"good"])])
    good = store.values[name]
    store.values[name] = good[:-1] + b"?"
    delete = StoreClient.delete_if_equal

    def replaced_first(client: StoreClient, name: bytes, value: Sequence[bytes | memoryview]) -> None:
        store.values[name] = good
        delete(client, name, value)

    monkeypatch.setattr(StoreClient, "delete_if_equal", replaced_first)
    assert tier.load([empty(key(1), (4,))]) == [CORRUPT]
    assert tier.load([empty(key(1), (4,))]) == [DONE]


def test_an_open_breaker_permits_single_probes() -> None:
    """Each probe doubles the time until the next one. A successful probe closes the breaker."""
    now = 0.0
    breaker = CircuitBreaker(lambda: now)
    for _ in range(FAILURES):
        assert breaker.permits()
        breaker.failed("lost")
    for _ in range(8):
        breaker.failed("calls that began before")
    assert not breaker.permits()
    now += PROBE_SECONDS
    assert breaker.permits(), "one probe"
    assert not breaker.permits(), "only one"
    breaker.failed("lost")
    now += PROBE_SECONDS
    assert not breaker.permits(), "not yet"
    now += PROBE_SECONDS
    assert breaker.permits(), "the next probe"
    for _ in range(20):
        breaker.failed("lost")
        now += MAX_PROBE_SECONDS
        assert breaker.permits(), "never later"
    breaker.succeeded()
    assert breaker.permits()
    assert breaker.permits()
    for _ in range(FAILURES):
        breaker.failed("lost")
    now += PROBE_SECONDS
    assert breaker.permits(), "as soon as after the first failures"


def test_one_failure_keeps_the_breaker_closed() -> None:
    """Only failures in a row count."""
    breaker = CircuitBreaker()
    for _ in range(10):
        breaker.failed("lost")
        assert breaker.permits()
        breaker.succeeded()


def test_transfers_wait_for_the_budget() -> None:
    """The sum of the bytes in flight stays within the budget; a larger transfer runs alone."""
    budget = ByteBudget(100)
    order: list[str] = []

    def transfer(nbytes: int, name: str) -> None:
        with budget.reserve(nbytes):
            order.append(name)

    waiting = threading.Thread(target=transfer, args=(60, "second"))
    with budget.reserve(60):
        with budget.reserve(40):
            waiting.start()
            order.append("first")
        waiting.join(0.1)
        assert order == ["first"]
    waiting.join()
    assert order == ["first", "second"]
    with budget.reserve(1000):
        pass
