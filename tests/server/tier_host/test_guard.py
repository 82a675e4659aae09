"""The guard between a tier and the server keeps the contract, even if the tier does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from contracts.tier import CORRUPT, DONE, FAILED, MIB, MISSING, SPACE, content, empty, full, held
from harness.bad_tiers import ERRORS, HONEST_ENTRY, BadTier

from kvtier.server.tier_host import guard
from kvtier.server.tier_host.guard import CheckedTier
from kvtier.server.tier_host.threads import TierThreads, WorkQueue
from kvtier.server.tier_host.worker import TierWorker
from kvtier.tiers.secondary_tier import BlockBytes, OffloadPolicy, Outcome, RequestInfo, Vote

pytestmark = pytest.mark.usefixtures("no_leaks")

NAME = (SPACE, b"key")
VOTE_SECONDS = guard.VOTE_SECONDS
REQUEST = RequestInfo("r", SPACE, kv_transfer_params={"do_remote_decode": True})
WORKS = ("store", "load", "remove", "on_new_request", "on_request_finished")


class Rig:
    """A bad tier behind its guard."""

    def __init__(self, directory: Path) -> None:
        self.tier = BadTier("bad", directory, MIB)
        self.threads = TierThreads("bad")
        self.guard = CheckedTier(self.tier, self.threads)

    def have(self, what: str, content: str = "") -> Path:
        """Makes the tier misbehave."""
        path = self.tier.directory / what
        path.write_text(content)
        return path

    def do(self, work: str) -> object:
        """Calls a method of the tier that works."""
        calls: dict[str, Callable[[], object]] = {
            "store": lambda: self.guard.store([full(b"a", [b"a"]), full(b"b", [b"b"])]),
            "load": lambda: self.guard.load([empty(b"a", (1,)), empty(b"b", (1,))]),
            "remove": lambda: self.guard.remove([NAME]),
            "on_new_request": lambda: self.guard.on_new_request(REQUEST).policy,
            "on_request_finished": lambda: self.guard.on_request_finished("r"),
        }
        return calls[work]()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Returns a bad tier that behaves well so far; its votes are in time on a busy machine, too."""
    monkeypatch.setattr(guard, "VOTE_SECONDS", 30.0)
    rig = Rig(tmp_path)
    yield rig
    assert rig.threads.close(5)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("work", WORKS)
def test_an_exception_fails_the_job(rig: Rig, work: str, error: str) -> None:
    """Any exception in any method puts the tier in trouble until its next success."""
    path = rig.have(f"raise-{work}", error)
    assert rig.do(work) in ([FAILED, FAILED], OffloadPolicy.BLOCK_LEVEL, None)
    if work == "on_request_finished":
        assert rig.threads.close(5)
    assert rig.guard.last_error == f"{work} failed: {error}: odd"
    path.unlink()
    if work != "on_request_finished":
        assert rig.do(work) in ([DONE, DONE], [MISSING, MISSING], OffloadPolicy.REQUEST_LEVEL, None)
        assert rig.guard.last_error is None


@pytest.mark.parametrize(
    ("answer", "outcomes"),
    [
        ([DONE], [FAILED, FAILED]),
        ([], [FAILED, FAILED]),
        ([DONE] * 3, [FAILED, FAILED]),
        (None, [FAILED, FAILED]),
        (7, [FAILED, FAILED]),
        (DONE, [FAILED, FAILED]),
        ("ab", [FAILED, FAILED]),
        ([DONE, None], [DONE, FAILED]),
        (["done", DONE], [FAILED, DONE]),
        ([True, 1], [FAILED, FAILED]),
        ((DONE, MISSING), [DONE, MISSING]),
    ],
)
@pytest.mark.parametrize("work", ["store", "load"])
def test_invalid_outcomes_fail_the_job(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, work: str, answer: Any, outcomes: list[Outcome]
) -> None:
    """Too few, too many or invalid outcomes cannot be assigned to blocks."""
    monkeypatch.setattr(rig.tier, work, lambda _: answer)
    assert rig.do(work) == outcomes
    assert bool(rig.guard.last_error) == (FAILED in outcomes)


@pytest.mark.parametrize(
    ("answer", "shown"),
    [(0, 0), (5 << 40, 5 << 40), (None, None), (-1, None), (1 << 63, None), (1.5, None), ("1", None)],
)
def test_an_invalid_number_of_free_bytes_is_unknown(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, answer: Any, shown: int | None
) -> None:
    monkeypatch.setattr(rig.tier, "free_disk_bytes", lambda: answer)
    assert rig.guard.free_disk_bytes() == shown
    assert bool(rig.guard.last_error) == (answer != shown)


@pytest.mark.parametrize("error", ERRORS)
def test_a_failing_measurement_of_the_disk_is_a_trouble(rig: Rig, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """The trouble ends with the next measurement that succeeds."""

    def fail() -> int:
        raise ERRORS[error]("odd")

    monkeypatch.setattr(rig.tier, "free_disk_bytes", fail)
    assert rig.guard.free_disk_bytes() is None
    assert rig.guard.last_error == f"free_disk_bytes failed: {error}: odd"
    monkeypatch.setattr(rig.tier, "free_disk_bytes", lambda: 7)
    assert rig.guard.free_disk_bytes() == 7
    assert rig.guard.last_error is None


@pytest.mark.parametrize("vote", [None, "request_level", OffloadPolicy.REQUEST_LEVEL, Vote(2, "why"), Vote(None, "")])
def test_an_invalid_vote_does_not_count(rig: Rig, monkeypatch: pytest.MonkeyPatch, vote: Any) -> None:
    monkeypatch.setattr(rig.tier, "on_new_request", lambda _: vote)
    assert rig.guard.on_new_request(REQUEST).policy is OffloadPolicy.BLOCK_LEVEL
    assert rig.guard.last_error


def test_a_slow_vote_is_not_awaited(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop waits briefly, once.

    The tier is not told the end of requests it never saw (B3.12).
    """
    monkeypatch.setattr(guard, "VOTE_SECONDS", VOTE_SECONDS)
    hang = rig.have("hang-on_new_request")
    votes = [rig.guard.on_new_request(RequestInfo(f"{number}", SPACE)) for number in range(100)]
    assert {vote.policy for vote in votes} == {OffloadPolicy.BLOCK_LEVEL}
    assert "did not answer in time" in votes[0].why
    assert {vote.why for vote in votes[1:]} == {"no vote: it is still busy with another request"}
    assert "no vote within" in (rig.guard.last_error or "")
    for number in range(100):
        rig.guard.on_request_finished(f"{number}")
    hang.unlink()
    while rig.guard.on_new_request(REQUEST).policy is OffloadPolicy.BLOCK_LEVEL:
        rig.guard.on_request_finished("r")
    rig.guard.on_request_finished("r")
    assert rig.threads.close(5)
    again = (len(rig.tier.heard) - 2) // 2
    assert rig.tier.heard == ["new 0", "end 0"] + ["new r", "end r"] * again
    assert rig.guard.last_error is None


def test_a_tier_with_late_votes_is_not_awaited(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a late vote the loop waits for none until one has come in time."""
    monkeypatch.setattr(guard, "VOTE_SECONDS", VOTE_SECONDS)
    hang = rig.have("hang-on_new_request")
    assert "did not answer in time" in rig.guard.on_new_request(REQUEST).why
    hang.unlink()
    rig.guard._voting.result(60)
    assert "no vote within" in (rig.guard.last_error or ""), "a late vote does not end the trouble"

    go, honest = threading.Event(), rig.tier.on_new_request
    monkeypatch.setattr(rig.tier, "on_new_request", lambda request: (go.wait(60), honest(request))[1])
    monkeypatch.setattr(guard, "VOTE_SECONDS", 600.0)
    assert "did not answer in time" in rig.guard.on_new_request(REQUEST).why, "and the loop does not wait"
    go.set()
    assert rig.guard._voting.result(60).policy is OffloadPolicy.REQUEST_LEVEL
    assert rig.guard.last_error is None
    assert rig.guard.on_new_request(REQUEST).policy is OffloadPolicy.REQUEST_LEVEL, "this one is"


class UnprintableError(BaseException):
    """An exception whose text cannot be computed."""

    def __str__(self) -> str:
        raise RuntimeError("raise_unprintable")

    __repr__ = __str__


class Opaque:
    """An object that raises when it is inspected."""

    @property
    def __class__(self) -> Any:  # `isinstance` reads it
        raise UnprintableError

    def __repr__(self) -> str:
        raise UnprintableError


def raise_unprintable(*_: object) -> Any:
    """Raises an exception that has no text."""
    raise UnprintableError


@pytest.mark.parametrize("work", WORKS)
def test_an_error_without_a_text_is_named_by_type(rig: Rig, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    """The tier is then called again."""
    monkeypatch.setattr(rig.tier, work, raise_unprintable)
    for _ in range(2):
        assert rig.do(work) in ([FAILED, FAILED], OffloadPolicy.BLOCK_LEVEL, None)
    assert rig.threads.close(5)
    assert rig.guard.last_error == f"{work} failed: UnprintableError"


def test_an_opaque_vote_is_invalid(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that raises when inspected, or a vote whose reason has no text."""
    monkeypatch.setattr(rig.tier, "on_new_request", lambda _: Vote(Opaque(), ""))  # type: ignore[arg-type]
    assert "it failed" in rig.guard.on_new_request(REQUEST).why
    monkeypatch.setattr(rig.tier, "on_new_request", lambda _: [Opaque()])
    assert "its vote is invalid" in rig.guard.on_new_request(REQUEST).why
    monkeypatch.setattr(rig.tier, "on_new_request", lambda _: Vote(OffloadPolicy.REQUEST_LEVEL, UnprintableError()))  # type: ignore[arg-type]
    assert "it failed" in rig.guard.on_new_request(REQUEST).why


@pytest.mark.parametrize("work", ["store", "load"])
def test_opaque_outcomes_fail_the_job(rig: Rig, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    """The worker catches what passes the guard: the job fails once, and the tier is in trouble."""
    worker = TierWorker(rig.tier)
    monkeypatch.setattr(rig.tier, work, lambda blocks: [Opaque() for _ in blocks])
    ends: SimpleQueue[Sequence[Outcome]] = SimpleQueue()
    for _ in range(2):
        getattr(worker, work)(lambda: [empty(b"a", (1,)), empty(b"b", (1,))], 2, ends.put)
        assert ends.get(timeout=60) == [FAILED, FAILED]
    assert worker.close()
    assert ends.empty()
    assert worker.tier.last_error == f"{work} failed: UnprintableError"


def test_a_failing_lookup_is_answered_as_a_miss(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = TierWorker(rig.tier)
    monkeypatch.setattr(worker.tier, "lookup", raise_unprintable)
    answers: SimpleQueue[Sequence[bool]] = SimpleQueue()
    worker.look_up([NAME], answers.put)
    assert answers.get(timeout=60) == []
    assert worker.close()
    assert worker.tier.last_error == "lookup failed: UnprintableError"


@pytest.mark.parametrize("foreign", [True, False])
def test_a_tier_may_release_its_views(rig: Rig, monkeypatch: pytest.MonkeyPatch, *, foreign: bool) -> None:
    """With `with part as view:` the job ends normally, and the block is there."""

    def load(blocks: Sequence[BlockBytes]) -> list[Outcome]:
        for block in blocks:
            for part in block.parts:
                with part as view:
                    view[:] = b"x" * view.nbytes
        return [DONE for _ in blocks]

    worker = TierWorker(rig.tier)
    monkeypatch.setattr(worker.tier, "_foreign", foreign)
    monkeypatch.setattr(rig.tier, "load", load)
    target, ends = bytearray(5000), SimpleQueue[Sequence[Outcome]]()
    worker.load(lambda: [BlockBytes(SPACE, b"a", (memoryview(target),))], 1, ends.put)
    assert ends.get(timeout=60) == [DONE]
    assert target == b"x" * 5000
    assert worker.close()
    assert worker.tier.last_error is None


def test_invalid_entries_are_left_out(rig: Rig) -> None:
    """Invalid sizes, names and objects stay left out; valid entries are listed."""
    rig.have("lie-entries")
    assert list(rig.guard.entries()) == [HONEST_ENTRY]
    assert "21 of the listed blocks are invalid and ignored; the first: Entry(" in rig.guard.last_error
    assert set(rig.guard.invalid_entries) == {(HONEST_ENTRY.namespace, b"lie" + bytes(4))}, (
        "which the server has removed"
    )


@pytest.mark.parametrize("error", ERRORS)
def test_entries_before_an_error_are_kept(rig: Rig, error: str) -> None:
    rig.have("raise-last-entry", error)
    assert list(rig.guard.entries()) == [HONEST_ENTRY]
    assert f"listing them failed: {error}" in (rig.guard.last_error or "")


def test_an_invalid_list_of_entries_is_empty(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.tier, "entries", lambda: None)
    assert list(rig.guard.entries()) == []
    assert rig.guard.last_error


@pytest.mark.parametrize("written", [0.0, 0.3, 0.99])
def test_an_incomplete_load_is_detected(rig: Rig, monkeypatch: pytest.MonkeyPatch, written: float) -> None:
    """A part that was not written to its end fails despite DONE; a complete part does not."""
    parts = content("x", (5000, 100, 3))
    rig.guard.store([full(b"a", parts), full(b"b", parts)])
    sound = empty(b"b", (5000, 100, 3))
    assert rig.guard.load([sound]) == [DONE]
    assert held(sound) == parts
    whole = rig.tier.load

    def load(blocks: Any) -> list[Outcome]:
        whole(blocks[1:])
        for part, data in zip(blocks[0].parts, parts, strict=True):
            end = int(len(data) * written)
            part[:end] = data[:end]
        return [DONE] * len(blocks)

    monkeypatch.setattr(rig.tier, "load", load)
    assert rig.guard.load([empty(b"a", (5000, 100, 3)), sound]) == [CORRUPT, DONE]
    assert rig.guard.last_error


def test_invalid_answers_of_a_shared_tier_are_misses(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer must have a value for each key."""
    for answer in ([True], None, [True] * 3):
        monkeypatch.setattr(rig.tier, "lookup", lambda _, answer=answer: answer)
        assert rig.guard.lookup([NAME, NAME]) == [False, False]
        assert rig.guard.last_error
    monkeypatch.setattr(rig.tier, "lookup", lambda _: [True, False])
    assert rig.guard.lookup([NAME, NAME]) == [True, False]
    assert rig.guard.last_error is None


def test_a_tiers_own_trouble_is_reported_with_errors(rig: Rig) -> None:
    rig.tier.last_error = "my disk is full"
    assert rig.guard.last_error == "my disk is full"
    rig.have("raise-store", "MemoryError")
    rig.do("store")
    assert rig.guard.last_error == "my disk is full; store failed: MemoryError: odd"


class FailingTrouble(BadTier):
    moody = False

    @property
    def last_error(self) -> str | None:  # type: ignore[override]
        if self.moody:
            raise UnprintableError
        return "not well"

    @last_error.setter
    def last_error(self, error: str | None) -> None:
        pass


def test_a_failing_trouble_property_is_a_trouble(tmp_path: Path) -> None:
    """The trouble ends when the property works again."""
    tier = FailingTrouble("moody", tmp_path, MIB)
    guarded = CheckedTier(tier, TierThreads("moody"))
    assert guarded.last_error == "not well"
    tier.moody = True
    assert guarded.last_error == "last_error failed: UnprintableError"
    tier.moody = False
    assert guarded.last_error == "not well"


def test_attributes_of_a_tier_are_read_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core uses them in every call, and a later value could be anything."""
    monkeypatch.delattr(BadTier, "durable")
    monkeypatch.delattr(BadTier, "type")
    assert (rig.guard.type, rig.guard.durable) == ("bad", True)


def test_worker_threads_survive_exceptions() -> None:
    """The thread serves the next call; calls that have not begun can be withdrawn."""

    def fail(error: type[BaseException]) -> None:
        raise error("odd")

    threads = TierThreads("t")
    done: list[object] = []
    begun, go = threading.Event(), threading.Event()
    for error in ERRORS.values():
        threads.submit(WorkQueue.STORE, "store", partial(fail, error))
    threads.submit(WorkQueue.STORE, "store", lambda: (begun.set(), done.append(go.wait(60))))
    threads.submit(WorkQueue.STORE, "store", lambda: done.append("never"), lambda: done.append("taken back"))
    assert begun.wait(60)
    assert threads.overdue(0) == {WorkQueue.STORE: "store"}
    assert threads.overdue(60) == {}
    threads.abandon(WorkQueue.STORE)
    go.set()
    assert threads.close(5)
    assert done == ["taken back", True]


def test_closing_waits_for_a_hanging_thread_until_a_timeout() -> None:
    """The result says that the thread has not ended."""
    threads, begun, go = TierThreads("t"), threading.Event(), threading.Event()
    threads.submit(WorkQueue.LOAD, "load", lambda: (begun.set(), go.wait()))
    assert begun.wait(60)
    assert not threads.close(0.1)
    go.set()
    assert threads.close(5)


@pytest.mark.parametrize("error", [*ERRORS.values(), StopIteration, KeyError])
async def test_an_exception_of_a_check_reaches_its_caller(tmp_path: Path, error: type[BaseException]) -> None:
    """The caller gets any exception as an error that it can catch."""

    def fail() -> None:
        raise error("odd")

    worker = TierWorker(BadTier("bad", tmp_path, MIB))
    with pytest.raises(Exception, match="odd"):
        await worker.check(fail)
    assert await worker.check(lambda: 7) == 7
    assert worker.close()
