"""A tier as the rest of the server sees it: whatever it does, its answers keep to the contract of tiers.

A tier may be anybody's class. What it raises, how many outcomes it returns, what it claims to hold: all of it is looked at
here, so that neither the core nor the runtime has to. What is wrong shows in `trouble`, and in the log once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast

from ...tiers.base import BlockBytes, Entry, NamespaceId, OffloadPolicy, Outcome, RequestInfo, SecondaryTier, Vote
from ...tiers.core.secondary import Name
from ...tiers.storage.fsck import NAMESPACE_BYTES, Checkable
from ...tiers.storage.health import TierHealth
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


def describe_error(error: BaseException) -> str:
    """Returns what an error says, or only its kind where it cannot say it."""
    try:
        return f"{type(error).__name__}: {error!s:.200}"
    except BaseException:  # noqa: BLE001 - `__str__` may raise anything
        return type(error).__name__


def safe_repr(thing: object) -> str:
    """Returns what a thing looks like, shortened; likewise."""
    try:
        return f"{thing!r:.100}"
    except BaseException:  # noqa: BLE001
        return f"a {type(thing).__name__}"


def copy_views(blocks: Sequence[BlockBytes]) -> list[BlockBytes]:
    """Returns the blocks with views of their own, which a tier may release (`with part as view:`) without harm to others."""
    return [BlockBytes(block.namespace, block.key, tuple(part[:] for part in block.parts)) for block in blocks]


def write_canary(part: memoryview, canary: bytes) -> None:
    """Marks a part where a load that stops half-way, or does nothing, would leave the mark. Tiny parts are let be."""
    for at in _places(part):
        part[at : at + CANARY_BYTES] = canary


def canary_intact(part: memoryview, canary: bytes) -> bool:
    """Returns whether a mark is still there."""
    return any(part[at : at + CANARY_BYTES] == canary for at in _places(part))


def _places(part: memoryview) -> tuple[int, ...]:
    tiny = part.nbytes < 3 * CANARY_BYTES
    return () if tiny else (0, part.nbytes // 2, part.nbytes - CANARY_BYTES)


VOTE_SECONDS = 0.05
"""How long the event loop waits for the vote of a tier that is not part of kvtier; not at all, if its last came later."""


_MAX_KEY_BYTES = 1024


_OWN = f"{SecondaryTier.__module__.partition('.')[0]}."


_ATTRIBUTES = ("type", "durable", "medium", "local", "shared")
"""What a tier says of itself, once: it was looked at when the tier was opened."""


_FAILED = object()


class CheckedTier(SecondaryTier):
    """Passes everything on to a tier, and sees to it that what comes back is what it should be."""

    def __init__(self, tier: SecondaryTier, threads: TierThreads) -> None:
        """Tiers of kvtier's own are known not to block and to verify what they load; of others neither is taken on trust."""
        self._tier = tier
        self._noted: str | None = None
        self._troubles = TierHealth(self)
        super().__init__(tier.name, tier.capacity_bytes)
        for attribute in _ATTRIBUTES:
            setattr(self, attribute, getattr(tier, attribute))
        self.unwanted: list[Name] = []
        """What the tier says it holds in sizes that cannot be; it had better be removed."""
        self._foreign = not type(tier).__module__.startswith(_OWN)
        self._threads = threads
        self._voting: Future[Vote] | None = None
        self._late = False
        """Whether the last vote was not there in time."""
        self._unheard: Counter[str] = Counter()
        """Requests that the tier was not told of, because it was still busy with another."""

    @property
    def trouble(self) -> str | None:
        """What the tier says is wrong, and what is found wrong with it."""
        own = self._try("trouble", lambda: f"{self._tier.trouble or ''}")
        if own is _FAILED:
            return self._noted
        self.note("trouble", None)
        return "; ".join(trouble for trouble in (own, self._noted) if trouble) or None

    @trouble.setter
    def trouble(self, trouble: str | None) -> None:
        self._noted = trouble

    @property
    def checkable(self) -> Checkable | None:
        """The tier, if its blocks can be verified."""
        return cast("Checkable", self._tier) if isinstance(self._tier, Checkable) else None

    def note(self, work: str, trouble: str | None) -> None:
        """Takes down what is wrong with one kind of work, or that it went well. May be called on any thread."""
        self._troubles.note(work, trouble)

    def on_new_request(self, request: RequestInfo) -> Vote:
        """Asks for a vote; BLOCK_LEVEL where none comes.

        A tier of somebody else's is asked on a thread, and not waited for longer than `VOTE_SECONDS`; after a vote that came
        late not at all, until one has come in time again, for each wait holds up everybody. As long as it has not come back
        from a request it is asked about no other: then it hears nothing of those.
        """
        if not self._foreign:
            return self._vote(request)
        if self._voting is not None and not self._voting.done():
            self._unheard[request.request_id] += 1
            return _abstain("it is still busy with another request")
        future: Future[Vote] = Future()
        self._voting = future
        wait, deadline = 0 if self._late else VOTE_SECONDS, time.monotonic() + VOTE_SECONDS
        try:
            self._threads.submit(WorkQueue.VOTE, "on_new_request", lambda: self._answer(future, request, deadline))
        except RuntimeError:  # no thread to be had
            future.cancel()
            self._unheard[request.request_id] += 1
            return _abstain("it could not be asked")
        try:
            return future.result(wait)
        except TimeoutError:
            if wait:
                self._note_late(late=True)
            return _abstain("it did not answer in time")

    def on_request_finished(self, request_id: str) -> None:
        """Passes it on, behind the request's vote; unless the tier never heard of the request."""

        def finish() -> None:
            if self._try("on_request_finished", lambda: self._tier.on_request_finished(request_id)) is not _FAILED:
                self.note("on_request_finished", None)

        if request_id in self._unheard:
            self._unheard -= Counter([request_id])
        elif self._foreign:
            with contextlib.suppress(RuntimeError):  # no thread to be had
                self._threads.submit(WorkQueue.VOTE, "on_request_finished", finish)
        else:
            finish()

    def entries(self) -> Iterator[Entry]:
        """Returns what can be an entry of what the tier lists, the first of each name."""
        return iter(self._sound_entries())

    def lookup(self, keys: Sequence[Name]) -> list[bool]:
        """Asks what is there; nothing, where that goes wrong."""
        answers: Any = self._try("lookup", lambda: list(self._tier.lookup(keys)))
        if answers is _FAILED or not self._counts("lookup", answers, keys):
            return [False] * len(keys)
        self.note("lookup", None)
        return [answer is True for answer in answers]

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Stores; a job that raises or whose outcomes cannot be told apart has failed."""
        return self._outcomes("store", self._tier.store, blocks)

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Loads, likewise. Of a tier of somebody else's, a part that was not written to has not been loaded."""
        if not self._foreign:
            return self._outcomes("load", self._tier.load, blocks)
        canary = os.urandom(CANARY_BYTES)
        for block in blocks:
            for part in block.parts:
                write_canary(part, canary)
        outcomes = self._outcomes("load", self._tier.load, copy_views(blocks))
        for number, block in enumerate(blocks):
            if outcomes[number] is Outcome.DONE and any(canary_intact(part, canary) for part in block.parts):
                self.note("load", "says that it has loaded blocks that it has not filled")
                outcomes[number] = Outcome.CORRUPT
        return outcomes

    def remove(self, keys: Sequence[Name]) -> None:
        """Removes; what goes wrong is noted."""
        if self._try("remove", lambda: self._tier.remove(keys)) is not _FAILED:
            self.note("remove", None)

    def close(self) -> None:
        """Closes the tier."""
        self._tier.close()

    def _note_late(self, *, late: bool) -> None:
        self._late = late
        self.note("vote", f"on_new_request: no vote within {VOTE_SECONDS:g} s" if late else None)

    def _answer(self, future: Future[Vote], request: RequestInfo, deadline: float) -> None:
        """Runs on the thread of votes. Whatever happens the future is set: else the tier would be asked nothing any more."""
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
            self.note("on_new_request", f"votes {safe_repr(vote)}")
            return None

        vote = self._try("on_new_request", ask)
        if vote is _FAILED:
            return _abstain("it failed")
        if vote is None:
            return _abstain("its vote is none")
        self.note("on_new_request", None)
        return cast("Vote", vote)

    def _sound_entries(self) -> list[Entry]:
        sound: dict[Name, Entry] = {}
        bad: list[str] = []
        try:
            for entry in self._tier.entries():
                problem = self._problem_of(entry) or (
                    "is listed twice" if (entry.namespace, entry.key) in sound else ""
                )
                if problem:
                    bad.append(f"{safe_repr(entry)} {problem}")
                else:
                    sound[entry.namespace, entry.key] = entry
        except BaseException as error:  # noqa: BLE001 - the server starts with what it has heard of
            bad.append(f"the list broke off: {describe_error(error)}")
        if bad:
            self.note("entries", f"{len(bad)} of the blocks that it lists were left out; the first: {bad[0]}")
        return list(sound.values())

    def _problem_of(self, entry: Any) -> str:
        """Returns what is wrong with an entry, if anything."""
        if not isinstance(entry, Entry):
            return "is no entry"
        namespace, key, nbytes = cast("tuple[Any, Any, Any]", (entry.namespace, entry.key, entry.nbytes))
        if not isinstance(namespace, bytes) or len(namespace) != NAMESPACE_BYTES:
            return "is in no namespace"
        if not isinstance(key, bytes) or not 0 < len(key) <= _MAX_KEY_BYTES:
            return "has no key"
        if type(nbytes) is not int or not 0 < nbytes <= self.capacity_bytes:
            self.unwanted.append((NamespaceId(namespace), key))
            return "has an impossible size"
        return ""

    def _outcomes(
        self, work: str, move: Callable[[Sequence[BlockBytes]], list[Outcome]], blocks: Sequence[BlockBytes]
    ) -> list[Outcome]:
        outcomes: Any = self._try(work, lambda: list(move(blocks)))
        if outcomes is _FAILED or not self._counts(work, outcomes, blocks):
            return [Outcome.FAILED] * len(blocks)
        if not all(isinstance(outcome, Outcome) for outcome in outcomes):
            self.note(work, f"{work} returns what is no outcome: {safe_repr(outcomes)}")
            return [outcome if isinstance(outcome, Outcome) else Outcome.FAILED for outcome in outcomes]
        self.note(work, None)
        return list(outcomes)

    def _counts(self, work: str, answers: Sequence[object], asked: Sequence[object]) -> bool:
        """Returns whether there is an answer for each: else it is not known which belongs to which."""
        if len(answers) == len(asked):
            return True
        self.note(work, f"{work} returns {len(answers)} outcomes for {len(asked)} blocks")
        return False

    def _try(self, work: str, call: Callable[[], Any]) -> Any:
        """Returns what a call of the tier returns, or `_FAILED` if it raises: anything, for the tier is anybody's."""
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the server goes on
            self.note(work, f"{work} failed: {describe_error(error)}")
            return _FAILED


def _abstain(why: str) -> Vote:
    return Vote(OffloadPolicy.BLOCK_LEVEL, f"no vote: {why}")
