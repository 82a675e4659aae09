"""Queries to a shared tier that answers slowly: they are merged, and none waits for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest
from contracts.tier import MIB, SPACE
from harness.bad_tiers import BadTier

from kvtier.server.tier_host import worker as worker_module
from kvtier.server.tier_host.worker import TierWorker
from kvtier.tiers.secondary_tier import NamespaceId

pytestmark = pytest.mark.usefixtures("no_leaks")

Name = tuple[NamespaceId, bytes]
OTHER = NamespaceId(b"o" * 32)


class SlowTier(BadTier):
    """Tier whose lookups wait until `go_on` is set. It has the blocks with a key of one byte."""

    def __init__(self, directory: Path) -> None:
        super().__init__("slow", directory, MIB)
        self.calls: list[Sequence[Name]] = []
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def lookup(self, keys: Sequence[Name]) -> list[bool]:
        self.calls.append(keys)
        self.begun.set()
        assert self.go_on.wait(60)
        return [len(key) == 1 for _, key in keys]


class Rig:
    """A worker whose lookup thread is busy with a first query."""

    def __init__(self, directory: Path) -> None:
        self.tier = SlowTier(directory)
        self.worker = TierWorker(self.tier)
        self.answers: SimpleQueue[tuple[bytes, Sequence[bool]]] = SimpleQueue()
        self.look_up(b"first")
        assert self.tier.begun.wait(60)

    def look_up(self, *keys: bytes, space: NamespaceId = SPACE) -> None:
        self.worker.look_up(
            [(space, key) for key in keys], lambda answers: self.answers.put((b",".join(keys), answers))
        )

    def take(self, count: int) -> dict[bytes, Sequence[bool]]:
        return dict(self.answers.get(timeout=60) for _ in range(count))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.tier.go_on.set()
    assert rig.worker.close()
    assert rig.answers.empty()


def test_waiting_queries_are_one_call(rig: Rig) -> None:
    """Each gets the answers to its own keys."""
    for number in range(20):
        rig.look_up(b"%d" % number, b"absent")
    rig.tier.go_on.set()
    answers = rig.take(21)
    assert answers.pop(b"first") == [False]
    assert answers == {b"%d,absent" % number: [number < 10, False] for number in range(20)}
    assert [len(names) for names in rig.tier.calls] == [1, 40]
    rig.look_up(b"x")
    assert rig.take(1) == {b"x": [True]}


def test_a_call_has_a_limit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_MERGED_NAMES", 8)
    for number in range(5):
        rig.look_up(*[b"%d" % number] * 4)
    rig.tier.go_on.set()
    rig.take(6)
    assert [len(names) for names in rig.tier.calls] == [1, 8, 8, 4]


def test_a_query_that_has_waited_for_long_is_not_asked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no answer, which counts as a miss. Later queries are asked."""
    monkeypatch.setattr(worker_module, "_QUERY_SECONDS", 0.0)
    for key in (b"a", b"b"):
        rig.look_up(key)
    monkeypatch.undo()
    rig.look_up(b"c")
    rig.tier.go_on.set()
    assert rig.take(4) == {b"first": [False], b"a": [], b"b": [], b"c": [True]}
    assert len(rig.tier.calls) == 2


def test_the_number_of_waiting_queries_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A further one gets no answer at once."""
    monkeypatch.setattr(worker_module, "_MAX_QUERIES", 2)
    rig.look_up(b"a")
    rig.look_up(b"b")
    assert rig.take(1) == {b"b": []}
    rig.tier.go_on.set()
    assert rig.take(2) == {b"first": [False], b"a": [True]}


def test_queries_of_a_tenant_leave_room_and_turns_to_others(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant has half of the places. A query of another tenant is in the next call."""
    monkeypatch.setattr(worker_module, "_MAX_QUERIES", 8)
    monkeypatch.setattr(worker_module, "_MERGED_NAMES", 2)
    for number in range(6):
        rig.look_up(b"%d" % number)
    assert rig.take(2) == {b"4": [], b"5": []}
    rig.look_up(b"x", space=OTHER)
    rig.tier.go_on.set()
    assert rig.take(6) == {key: [len(key) == 1] for key in (b"first", b"0", b"1", b"2", b"3", b"x")}
    assert [[key for _, key in call] for call in rig.tier.calls] == [[b"first"], [b"0", b"x"], [b"1", b"2"], [b"3"]]


def test_queries_do_not_wait_for_a_stalled_call(rig: Rig) -> None:
    rig.look_up(b"a")
    assert rig.worker.watch(0)
    assert rig.take(1) == {b"a": []}
    rig.tier.go_on.set()
    assert rig.take(1) == {b"first": [False]}
    assert not rig.worker.watch(60)
    assert len(rig.tier.calls) == 1
