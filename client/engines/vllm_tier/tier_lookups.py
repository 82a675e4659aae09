"""Finding out what the store has of a request's chunks, off the scheduler's thread.

vLLM asks for one key at a time, again and again until the answer is not RETRY. What is asked for the first time in a step goes to
the server at the step's end, in one call per group, on a background thread. Whatever goes wrong is a miss in bounded time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

from ... import Client, KeyStatus, KVTierError, Lease, OffloadPolicy
from ..vllm.background import BackgroundThreads, LimitedLog
from ..vllm.request_settings import RequestSettings
from ..vllm.scheduler.prefix_lookups import RequestCalls
from ..vllm.scheduler.requests import RequestRegistration, server_name

__all__ = ["Answer", "Pin", "TierLookups", "TierRequest"]

_WAIT_SHARE = 0.8
_GROUP_BYTES = 4
_MOST_KINDS = 256
_BY_VALUE = "offload_policy"
_VALUE_CHARACTERS = 32
# Who asked so late that this share of the budget was over knows nothing of the server: only of how many asked before.
_LATE_SHARE = 0.5
# Less than the server's lease, which is a minute by default: what was found earlier is looked up again.
_PIN_SECONDS = 40.0


class Answer(Enum):
    """What is known of a key."""

    HIT = "hit"
    MISS = "miss"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Pin:
    """Where a hit is: item ``item`` of ``lease``, which is taken for good until ``until``."""

    lease: Lease
    item: int
    until: float


@dataclass
class TierRequest:
    """What the tier knows of a request. Belongs to the scheduler's thread, but for the announcement.

    ``known`` has a Pin for a hit and None for a miss; ``waiting`` the time until which the answer is waited for; ``new`` the keys
    that were asked for in this step, with the token at which each ends; ``asked`` those that the server is being asked for, with
    the time since when (the background threads'). ``loading`` counts loads of it that run; ``settled``: it was scheduled, so that
    nothing more of what was found will be loaded.
    """

    announcement: RequestRegistration
    known: dict[bytes, Pin | None] = field(default_factory=dict)
    waiting: dict[bytes, float] = field(default_factory=dict)
    new: dict[bytes, int] = field(default_factory=dict)
    asked: dict[bytes, float] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    loading: int = 0
    settled: bool = False
    ended: bool = False


@dataclass
class _Question:
    """Keys of one group that are looked up together. ``found`` and ``leases`` are the background thread's until it is done."""

    request: TierRequest
    keys: list[bytes]
    prefix: bool
    deadline: float
    found: dict[bytes, Pin] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)


class TierLookups(RequestCalls):
    """Runs lookups, and remembers how the server wants requests of a kind to be offloaded.

    Public methods are called on the scheduler's thread, and none blocks.
    """

    def __init__(self, client: Client, timeout_s: float, log: LimitedLog, threads: BackgroundThreads) -> None:
        """``threads`` carry the lookups out, and are closed with this."""
        super().__init__(client, log)
        self._timeout_s = timeout_s
        self._threads = threads
        self._done: deque[_Question] = deque()
        self._policies: dict[frozenset[tuple[str, str]], OffloadPolicy] = {}

    def begin(self, request_id: str, params: Mapping[str, Any] | None) -> TierRequest:
        """A request has come; nothing is said to the server yet."""
        settings = RequestSettings.parse(params, lambda text: self._log.warn("request", text))
        announcement = RequestRegistration(server_name(request_id), kv_transfer_params=settings.passed_on(params))
        announcement.settings = settings
        return TierRequest(announcement)

    def policy_of(self, request: TierRequest) -> OffloadPolicy:
        """How a request is to be offloaded, as far as that is known before the server was asked.

        vLLM wants to know at once, and takes no later word. So this is what the server said of the last request of its kind (one
        with the same parameters, each set or not, and the same ``offload_policy``), and for the first of a kind what the shipped
        rules say (B1.6).
        """
        params = request.announcement.kv_transfer_params or {}
        flagged = (
            bool(params.get("do_remote_decode")) or params.get(_BY_VALUE) == OffloadPolicy.REQUEST_LEVEL.name.lower()
        )
        shipped = OffloadPolicy.REQUEST_LEVEL if flagged else OffloadPolicy.BLOCK_LEVEL
        return self._policies.get(_kind(params), shipped)

    def answer(self, request: TierRequest, key: bytes, end_token: int) -> Answer:
        """What is known of ``key``, whose chunk ends before the request's ``end_token``; if nothing is, it will be asked for."""
        self._take_done()
        now = time.monotonic()
        if key in request.known:
            pin = request.known[key]
            if pin is None:
                return Answer.MISS
            if now < pin.until:
                return Answer.HIT
            del request.known[key]
        if key not in request.waiting:
            return self._ask_later(request, key, end_token, now + self._timeout_s)
        if now < request.waiting[key]:
            return Answer.UNKNOWN
        if request.asked.get(key, now) < now - self._timeout_s * _LATE_SHARE:
            self.cool_down()
        self._log.warn("lookup", f"a lookup took longer than {self._timeout_s:g} s; requests are computed instead")
        return self.miss(request, key)

    def miss(self, request: TierRequest, key: bytes) -> Answer:
        """``key`` is not to be had for this request, whatever was known or comes to be known: no endless retries (B3.18)."""
        request.waiting.pop(key, None)
        request.new.pop(key, None)
        request.known[key] = None
        return Answer.MISS

    def send(self, request: TierRequest) -> None:
        """The step ends: ask the server for what is new, one question per group."""
        groups: dict[bytes, list[bytes]] = {}
        for key in request.new:
            groups.setdefault(key[-_GROUP_BYTES:], []).append(key)
        announcement = request.announcement
        announcement.prompt_tokens = max(announcement.prompt_tokens, *request.new.values())
        for keys in groups.values():
            # vLLM asks for a prefix from its start, and for windows and states from the end; only the former ends with a miss.
            prefix = all(request.new[first] < request.new[second] for first, second in pairwise(keys))
            question = _Question(request, keys, prefix, min(request.waiting[key] for key in keys))
            self.hold(announcement)
            self._threads.submit(lambda question=question: self._run(question))  # type: ignore[misc]
        request.new.clear()

    def loads_ended(self, request: TierRequest) -> None:
        """A load of the request has ended."""
        request.loading -= 1
        if request.settled:
            self.settle(request)

    def settle(self, request: TierRequest) -> None:
        """The request is computed from here on: what was found and not loaded is given back, unless a load still reads it."""
        request.settled = True
        request.waiting.clear()
        if request.loading == 0:
            leases, request.leases = request.leases, []
            request.known.clear()
            request.settled = False
            self.release(leases)

    def end(self, request: TierRequest) -> None:
        """The request has ended; the server, which gives back what is pinned for it, hears of it after what is still running."""
        request.ended = True
        self.finish_request(request.announcement)

    def close(self) -> None:
        """End the threads; called at shutdown."""
        self._threads.close(0.5)
        super().close()

    def _ask_later(self, request: TierRequest, key: bytes, end_token: int, deadline: float) -> Answer:
        if request.ended or request.announcement.settings.skip_load or not self.reachable():
            return self.miss(request, key)
        request.waiting[key] = deadline
        request.new[key] = end_token
        return Answer.UNKNOWN

    def _take_done(self) -> None:
        while self._done:
            question = self._done.popleft()
            request = question.request
            if request.ended:
                continue  # the server gives back the leases of a request that has ended
            wanted = [key for key in question.keys if request.waiting.pop(key, None) is not None]
            for key in wanted:
                request.known[key] = question.found.get(key)
            if any(key in question.found for key in wanted):
                request.leases += question.leases
            else:
                self.release(question.leases)

    # ---- background threads from here on

    def _run(self, question: _Question) -> None:
        try:
            if not question.request.ended and not self.cooling and time.monotonic() < question.deadline:
                question.request.asked |= dict.fromkeys(question.keys, time.monotonic())
                self._look_up(question)
        except KVTierError as error:
            self.cool_down(error)
            self._log.warn("lookup", f"lookup failed, requests are computed instead: {error}")
        finally:
            # Whatever happened: a question without an answer would make its request wait for its whole budget.
            for key in question.keys:
                question.request.asked.pop(key, None)
            self._done.append(question)
            self.let_go(question.request.announcement)

    def _look_up(self, question: _Question) -> None:
        most = self._client.max_keys or len(question.keys)
        for first in range(0, len(question.keys), most):
            keys = question.keys[first : first + most]
            until = time.monotonic() + _PIN_SECONDS
            # Less than the budget: what is ready by then comes back in time to be used.
            wait = max(0.0, question.deadline - time.monotonic()) * _WAIT_SHARE
            lease = self.ask(question.request.announcement, keys, wait, prefix=question.prefix)
            question.leases += [lease] if lease.id else []
            hits = {
                key: Pin(lease, item, until) for item, key in enumerate(keys) if lease.statuses[item] == KeyStatus.HIT
            }
            question.found |= hits
            if question.prefix and len(hits) < len(keys):
                return

    def ask(
        self, request: RequestRegistration, keys: Sequence[bytes], wait: float, *, prefix: bool, min_hits: int = 0
    ) -> Lease:
        """As in RequestCalls; and notes how the server wants requests of this kind to be offloaded."""
        lease = super().ask(request, keys, wait, prefix=prefix, min_hits=min_hits)
        if lease.policy is not None:
            if len(self._policies) >= _MOST_KINDS:  # their names are the users'
                self._policies.clear()
            self._policies[_kind(request.kv_transfer_params or {})] = lease.policy
        return lease


def _kind(params: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Whether each is set; of the one that votes by its value, that."""
    return frozenset(
        (str(name), str(value)[:_VALUE_CHARACTERS] if name == _BY_VALUE else str(bool(value)))
        for name, value in params.items()
    )
