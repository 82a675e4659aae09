"""Wrapper of a tier that checks what the tier raises and returns.

The wrapper handles the tier's exceptions and checks the outcomes and entries that the tier returns.
So the core and the runtime get only valid values. Violations of the contract are logged and shown
in `last_error`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast

from ...tiers.core.presence_cache import Name
from ...tiers.secondary_tier import (
    BlockBytes,
    Entry,
    NamespaceId,
    OffloadPolicy,
    Outcome,
    RequestInfo,
    SecondaryTier,
    Vote,
)
from ...tiers.storage.fsck import Checkable
from ...tiers.storage.health import TierHealth
from ...tiers.types import NAMESPACE_BYTES
from .threads import TierThreads, WorkQueue

__all__ = [
    "CANARY_BYTES",
    "VOTE_SECONDS",
    "CheckedTier",
    "canary_intact",
    "copy_views",
    "describe_error",
    "safe_repr",
    "write_canary",
]

CANARY_BYTES = 8
VOTE_SECONDS = 0.05
"""Maximum wait for a third-party tier's vote.

After a late vote, the event loop does not wait for the tier's next vote.
"""
_MAX_KEY_BYTES = 1024
_MOST_BYTES = 2**63
_KVTIER = f"{SecondaryTier.__module__.partition('.')[0]}."
_ATTRIBUTES = (
    *("type", "durable", "medium", "local", "shared", "on_demand"),
    *("parallel_stores", "parallel_loads", "gather_bytes"),
)
"""Attributes copied from the tier; `open_tier` has checked them."""
_FAILED = object()
_ZEROS = bytes(64 << 10)


class CheckedTier(SecondaryTier):
    def __init__(self, tier: SecondaryTier, threads: TierThreads) -> None:
        """Wraps a tier. `threads` run the votes if the tier's class is not part of kvtier."""
        self._tier = tier
        self._last_error: str | None = None
        self._health = TierHealth(self)
        super().__init__(tier.name, tier.capacity_bytes)
        for attribute in _ATTRIBUTES:
            setattr(self, attribute, getattr(tier, attribute))
        self.invalid_entries: list[Name] = []
        """Listed entries with an impossible size; the runtime removes them."""
        self._foreign = not type(tier).__module__.startswith(_KVTIER)
        self._threads = threads
        self._voting: Future[Vote] | None = None
        self._last_vote_late = False
        """Whether the last vote came after `VOTE_SECONDS`."""
        self._not_asked: Counter[str] = Counter()
        """Ids of requests for which the tier was not asked to vote."""

    @property
    def last_error(self) -> str | None:
        """The tier's own error and the errors that this wrapper has found."""
        own = self._try("last_error", lambda: f"{self._tier.last_error or ''}")
        if own is _FAILED:
            return self._last_error
        self.report("last_error", None)
        return "; ".join(error for error in (own, self._last_error) if error) or None

    @last_error.setter
    def last_error(self, error: str | None) -> None:
        self._last_error = error

    def limitation(self) -> str | None:
        """The limitation of a tier of kvtier; other tiers can report an error."""
        return None if self._foreign else self._tier.limitation()

    @property
    def checkable(self) -> Checkable | None:
        """The tier if its blocks can be verified, else None."""
        return cast("Checkable", self._tier) if isinstance(self._tier, Checkable) else None

    def report(self, work: str, error: str | None) -> None:
        """Records the result of a kind of work: an error text, None after success. Thread-safe."""
        self._health.report(work, error)

    def on_new_request(self, request: RequestInfo) -> Vote:
        """Asks the tier for a vote; returns BLOCK_LEVEL if the tier does not vote.

        A third-party tier votes on a thread, and the event loop waits at most `VOTE_SECONDS`. After
        a late vote the event loop no longer waits, until the tier has voted in time again. While
        the tier votes on one request, it is not asked about other requests. The tier is not
        informed of the end of these requests either.
        """
        if not self._foreign:
            return self._vote(request)
        if self._voting is not None and not self._voting.done():
            self._not_asked[request.request_id] += 1
            return _abstain("it is still busy with another request")
        future: Future[Vote] = Future()
        self._voting = future
        wait, deadline = 0 if self._last_vote_late else VOTE_SECONDS, time.monotonic() + VOTE_SECONDS
        try:
            self._threads.submit(WorkQueue.VOTE, "on_new_request", lambda: self._answer(future, request, deadline))
        except RuntimeError:  # no thread available
            future.cancel()
            self._not_asked[request.request_id] += 1
            return _abstain("it could not be asked")
        try:
            return future.result(wait)
        except TimeoutError:
            if wait:
                self._note_late(late=True)
            return _abstain("it did not answer in time")

    def on_request_finished(self, request_id: str) -> None:
        """Informs the tier after its vote that a request has ended, if it was asked for a vote."""

        def finish() -> None:
            if self._try("on_request_finished", lambda: self._tier.on_request_finished(request_id)) is not _FAILED:
                self.report("on_request_finished", None)

        if request_id in self._not_asked:
            self._not_asked -= Counter([request_id])
        elif self._foreign:
            with contextlib.suppress(RuntimeError):  # no thread available
                self._threads.submit(WorkQueue.VOTE, "on_request_finished", finish)
        else:
            finish()

    def entries(self) -> Iterator[Entry]:
        """Returns the valid entries that the tier lists. Of duplicates only the first is valid."""
        valid: dict[Name, Entry] = {}
        bad: list[str] = []
        try:
            for entry in self._tier.entries():
                problem = self._problem_of(entry) or (
                    "is listed twice" if (entry.namespace, entry.key) in valid else ""
                )
                if problem:
                    bad.append(f"{safe_repr(entry)} {problem}")
                else:
                    valid[entry.namespace, entry.key] = entry
        except BaseException as error:  # noqa: BLE001 - the server starts with the entries listed so far
            bad.append(f"listing them failed: {describe_error(error)}")
        if bad:
            self.report("entries", f"{len(bad)} of the listed blocks are invalid and ignored; the first: {bad[0]}")
        return iter(valid.values())

    def lookup(self, keys: Sequence[Name]) -> list[bool]:
        """Returns which blocks the tier has; none if the lookup fails."""
        answers: Any = self._try("lookup", lambda: list(self._tier.lookup(keys)))
        if answers is _FAILED or not self._counts("lookup", answers, keys):
            return [False] * len(keys)
        self.report("lookup", None)
        return [answer is True for answer in answers]

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Stores blocks. All fail if the tier raises or returns a wrong number of outcomes."""
        return self._outcomes("store", self._tier.store, blocks)

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Loads blocks. A block is CORRUPT if a third-party tier did not fill one of its parts.

        The slots may contain blocks of another tenant. So the parts are zeros before the load of a
        third-party tier: bytes that it does not write stay zeros.
        """
        if not self._foreign:
            return self._outcomes("load", self._tier.load, blocks)
        canary = os.urandom(CANARY_BYTES)
        for block in blocks:
            for part in block.parts:
                _clear(part)
                write_canary(part, canary)
        outcomes = self._outcomes("load", self._tier.load, copy_views(blocks))
        for number, block in enumerate(blocks):
            if outcomes[number] is Outcome.DONE and any(canary_intact(part, canary) for part in block.parts):
                self.report("load", "load reports blocks as loaded although it has not written their bytes")
                outcomes[number] = Outcome.CORRUPT
        return outcomes

    def remove(self, keys: Sequence[Name]) -> None:
        if self._try("remove", lambda: self._tier.remove(keys)) is not _FAILED:
            self.report("remove", None)

    def free_disk_bytes(self) -> int | None:
        """Returns the tier's answer; None if the tier raises or the answer is no size."""
        found: Any = self._try("free_disk_bytes", self._tier.free_disk_bytes)
        if found is None or (type(found) is int and 0 <= found < _MOST_BYTES):
            self.report("free_disk_bytes", None)
            return found
        if found is not _FAILED:
            self.report("free_disk_bytes", f"free_disk_bytes returns {safe_repr(found)}, which is not a size")
        return None

    def close(self) -> None:
        self._tier.close()

    def _note_late(self, *, late: bool) -> None:
        self._last_vote_late = late
        self.report("vote", f"on_new_request: no vote within {VOTE_SECONDS:g} s" if late else None)

    def _answer(self, future: Future[Vote], request: RequestInfo, deadline: float) -> None:
        """Always sets the future; otherwise the tier would not be asked again."""
        vote = _abstain("it failed")
        try:
            vote = self._vote(request)
            self._note_late(late=time.monotonic() > deadline)
        finally:
            future.set_result(vote)

    def _vote(self, request: RequestInfo) -> Vote:
        def ask() -> Vote | None:
            vote: Any = self._tier.on_new_request(request)
            if isinstance(vote, Vote) and isinstance(vote.policy, OffloadPolicy):
                return Vote(vote.policy, f"{vote.why}")
            self.report("on_new_request", f"on_new_request returns {safe_repr(vote)}, which is not a Vote")
            return None

        vote = self._try("on_new_request", ask)
        if vote is _FAILED:
            return _abstain("it failed")
        if vote is None:
            return _abstain("its vote is invalid")
        self.report("on_new_request", None)
        return cast("Vote", vote)

    def _problem_of(self, entry: Any) -> str:
        """Returns what is wrong with an entry, or ""."""
        if not isinstance(entry, Entry):
            return "is not an Entry"
        namespace, key, nbytes = cast("tuple[Any, Any, Any]", (entry.namespace, entry.key, entry.nbytes))
        if not isinstance(namespace, bytes) or len(namespace) != NAMESPACE_BYTES:
            return "has an invalid namespace"
        if not isinstance(key, bytes) or not 0 < len(key) <= _MAX_KEY_BYTES:
            return "has an invalid key"
        if type(nbytes) is not int or not 0 < nbytes <= self.capacity_bytes:
            self.invalid_entries.append((NamespaceId(namespace), key))
            return "has an impossible size"
        return ""

    def _outcomes(
        self, work: str, move: Callable[[Sequence[BlockBytes]], list[Outcome]], blocks: Sequence[BlockBytes]
    ) -> list[Outcome]:
        outcomes: Any = self._try(work, lambda: list(move(blocks)))
        if outcomes is _FAILED or not self._counts(work, outcomes, blocks):
            return [Outcome.FAILED] * len(blocks)
        if set(map(type, outcomes)) - {Outcome}:
            self.report(work, f"{work} returns invalid outcomes: {safe_repr(outcomes)}")
            return [outcome if isinstance(outcome, Outcome) else Outcome.FAILED for outcome in outcomes]
        self.report(work, None)
        return list(outcomes)

    def _counts(self, work: str, answers: Sequence[object], asked: Sequence[object]) -> bool:
        if len(answers) == len(asked):
            return True
        self.report(work, f"{work} returns {len(answers)} outcomes for {len(asked)} blocks")
        return False

    def _try(self, work: str, call: Callable[[], Any]) -> Any:
        """Returns the result of a call, or `_FAILED` if it raises."""
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - a third-party tier may raise anything
            self.report(work, f"{work} failed: {describe_error(error)}")
            return _FAILED


def _abstain(why: str) -> Vote:
    return Vote(OffloadPolicy.BLOCK_LEVEL, f"no vote: {why}")


def describe_error(error: BaseException) -> str:
    """Returns the error's type and text, or only its type if its `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error!s:.200}"
    except BaseException:  # noqa: BLE001 - `__str__` may raise anything
        return type(error).__name__


def safe_repr(thing: object) -> str:
    """Returns a shortened `repr`, or only the type if `__repr__` raises."""
    try:
        return f"{thing!r:.100}"
    except BaseException:  # noqa: BLE001
        return f"a {type(thing).__name__}"


def copy_views(blocks: Sequence[BlockBytes]) -> list[BlockBytes]:
    """Returns the blocks with new views of the same memory. A tier may release these views."""
    return [BlockBytes(block.namespace, block.key, tuple(part[:] for part in block.parts)) for block in blocks]


def _clear(part: memoryview) -> None:
    for start in range(0, part.nbytes, len(_ZEROS)):
        piece = part[start : start + len(_ZEROS)]
        piece[:] = _ZEROS[: piece.nbytes]


def write_canary(part: memoryview, canary: bytes) -> None:
    """Marks start, middle and end of a part, to detect a load that does not fill it."""
    for at in _canary_offsets(part):
        part[at : at + CANARY_BYTES] = canary


def canary_intact(part: memoryview, canary: bytes) -> bool:
    return any(part[at : at + CANARY_BYTES] == canary for at in _canary_offsets(part))


def _canary_offsets(part: memoryview) -> tuple[int, ...]:
    tiny = part.nbytes < 3 * CANARY_BYTES
    return () if tiny else (0, part.nbytes // 2, part.nbytes - CANARY_BYTES)
