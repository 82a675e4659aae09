"""Lookups of requests' chunks, made on background threads.

vLLM asks for one key at a time, and again in every step while the answer is RETRY. At the end of a
step the new keys go to the server, in one call per group. A failure becomes a miss within a bounded
time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any, Unpack

from ... import Client, KeyStatus, KVTierError, Lease, LeaseOptions, Medium, OffloadPolicy, TierFilter
from ..vllm.background import BackgroundThreads, RateLimitedLog
from ..vllm.request_settings import RequestSettings
from ..vllm.scheduler.requests import RequestRegistration, server_name
from ..vllm.scheduler.server_calls import RequestCalls

__all__ = ["Answer", "Pin", "TierLookups", "TierRequest"]

_WAIT_SHARE = 0.8
_GROUP_BYTES = 4
_MAX_KINDS = 256
_BY_VALUE = "offload_policy"
_VALUE_CHARACTERS = 32
# If a key times out, the circuit opens only if the server had at least this share of the timeout
# for the key. Otherwise the key has mostly waited in a queue, and the server is perhaps not slow.
_LATE_SHARE = 0.5
# Shorter than the server's lease (60 s by default). A hit older than this is looked up again.
_PIN_SECONDS = 40.0
# Releases of leases wait for touches on the same thread, so an older touch is dropped.
_TOUCH_SECONDS = 5.0
_ALL_TIERS = TierFilter(media=tuple(Medium))
"""Excludes all tiers but the CPU tier, so that nothing is promoted."""
# Parameters that users and proxies set, and the default rules know (B1.6).
_COMMON_PARAMS: tuple[Mapping[str, Any] | None, ...] = (
    None,
    {"do_remote_decode": True},
    {"offload_policy": "block_level"},
    {"offload_policy": "request_level"},
)


class Answer(Enum):
    HIT = "hit"
    MISS = "miss"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Pin:
    """A hit: item number `item` of `lease`. The lease lasts at least until `until`."""

    lease: Lease
    item: int
    until: float


@dataclass
class TierRequest:
    """Lookup state of a request. Belongs to the scheduler's thread, except the registration.

    `known`: a Pin for a hit, None for a miss. `waiting`: deadlines of keys without an answer.
    `new`: keys of this step, with the token at which each chunk ends. `sent_at`: times at which
    keys were sent; belongs to the background threads. `loading`: number of loads in flight.
    `scheduled`: the request runs, so no more hits are loaded. `has_run`: it has run before.
    `used`: keys that the server knows this request has used; any thread may add to it.
    """

    registration: RequestRegistration
    known: dict[bytes, Pin | None] = field(default_factory=dict)
    waiting: dict[bytes, float] = field(default_factory=dict)
    new: dict[bytes, int] = field(default_factory=dict)
    sent_at: dict[bytes, float] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    loading: int = 0
    scheduled: bool = False
    has_run: bool = False
    used: set[bytes] = field(default_factory=set)
    ended: bool = False


@dataclass
class _LookupBatch:
    """Keys of one group in one lookup. The background thread fills in `found` and `leases`."""

    request: TierRequest
    keys: list[bytes]
    prefix: bool
    deadline: float
    found: dict[bytes, Pin] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)


class TierLookups(RequestCalls):
    """Runs lookups, and records the server's policy for each kind of request.

    Public methods run on the scheduler's thread and never block.
    """

    def __init__(self, client: Client, timeout_s: float, log: RateLimitedLog, threads: BackgroundThreads) -> None:
        super().__init__(client, log)
        self._timeout_s = timeout_s
        self._threads = threads
        self._done: deque[_LookupBatch] = deque()
        self._policies: dict[frozenset[tuple[str, str]], OffloadPolicy] = {}
        self._policies_epoch: int | None = None

    def begin(self, request_id: str, params: Mapping[str, Any] | None) -> TierRequest:
        """Returns the state of a new request. Does not call the server."""
        settings = RequestSettings.parse(params, lambda text: self._log.warn("request", text))
        forwarded = settings.forwarded_params(params)
        return TierRequest(
            RequestRegistration(server_name(request_id), kv_transfer_params=forwarded, settings=settings)
        )

    def ask_policies(self) -> None:
        """Asks the server for its policies for the usual parameters. Blocks; thread-safe."""
        self._policies_epoch = self._client.epoch
        for number, params in enumerate(_COMMON_PARAMS if self._client.connected else ()):
            request = RequestRegistration(f"policy-{number}", kv_transfer_params=params)
            try:
                self.lookup_keys(request, ())
                self._client.finish_request(request.request_id)
            except KVTierError as error:
                self._log.warn("policy", f"could not ask for the server's offload policies: {error}")
                return

    def policy_of(self, request: TierRequest) -> OffloadPolicy:
        """Estimates a request's policy, because vLLM needs it before the server is asked.

        The estimate is the server's policy for the last request of the same kind. Requests of one
        kind set the same parameters and the same `offload_policy`. For the first request of a kind,
        the estimate is REQUEST_LEVEL: kvtier cannot store a block that vLLM does not offer, but a
        block that the server already has costs only a call. Without a server, the estimate is the
        policy of the default rules (B1.6).
        """
        epoch = self._client.epoch
        params = request.registration.kv_transfer_params or {}
        if epoch is None:
            wanted = OffloadPolicy.REQUEST_LEVEL.name.lower()
            flagged = bool(params.get("do_remote_decode")) or params.get(_BY_VALUE) == wanted
            return OffloadPolicy.REQUEST_LEVEL if flagged else OffloadPolicy.BLOCK_LEVEL
        if epoch != self._policies_epoch:  # another run of the server may have other rules
            self._policies_epoch = epoch
            self._policies.clear()
            self._control_thread.submit(self.ask_policies)
        return self._policies.get(_kind(params), OffloadPolicy.REQUEST_LEVEL)

    def answer(self, request: TierRequest, key: bytes, end_token: int) -> Answer:
        """Returns the state of `key`, which ends at `end_token`. Queues a lookup if needed."""
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
            return self._queue_lookup(request, key, end_token, now + self._timeout_s)
        if now < request.waiting[key]:
            return Answer.UNKNOWN
        if request.sent_at.get(key, now) < now - self._timeout_s * _LATE_SHARE:
            self.circuit.open()
        self._log.warn("lookup", f"a lookup took longer than {self._timeout_s:g} s, so its request is computed")
        return self.miss(request, key)

    def miss(self, request: TierRequest, key: bytes) -> Answer:
        """Makes `key` a permanent miss for this request, to prevent endless retries (B3.18)."""
        request.waiting.pop(key, None)
        request.new.pop(key, None)
        request.known[key] = None
        return Answer.MISS

    def send(self, request: TierRequest) -> None:
        """Sends the step's new keys, one lookup per group."""
        groups: dict[bytes, list[bytes]] = {}
        for key in request.new:
            groups.setdefault(key[-_GROUP_BYTES:], []).append(key)
        registration = request.registration
        registration.prompt_tokens = max(registration.prompt_tokens, *request.new.values())
        for keys in groups.values():
            # vLLM asks for a prefix from its start, but for windows and states from the end.
            prefix = all(request.new[first] < request.new[second] for first, second in pairwise(keys))
            batch = _LookupBatch(request, keys, prefix, min(request.waiting[key] for key in keys))
            self.acquire(registration)
            self._threads.submit(lambda batch=batch: self._run(batch))  # type: ignore[misc]
        request.new.clear()

    def loads_ended(self, request: TierRequest) -> None:
        request.loading -= 1
        if request.scheduled:
            self.mark_scheduled(request)

    def mark_scheduled(self, request: TierRequest) -> None:
        """Records that the request runs. When no load is in flight, releases the hits."""
        request.scheduled = request.has_run = True
        request.waiting.clear()
        if request.loading == 0:
            leases, request.leases = request.leases, []
            request.known.clear()
            request.scheduled = False
            self.release_leases(leases)

    def touch(self, request: TierRequest, end_tokens: Mapping[bytes, int]) -> None:
        """Marks blocks of the server's CPU tier as used by the request. Loads no block.

        `end_tokens`: by key, the token at which the chunk ends. The server skips keys that it does
        not have.
        """
        if not request.registration.settings.skip_load and self._client.connected and not self.circuit.is_open:
            self.acquire(request.registration)
            until = time.monotonic() + _TOUCH_SECONDS
            self._control_thread.submit(lambda: self._touch(request, end_tokens, until))

    def end(self, request: TierRequest, end_tokens: Mapping[bytes, int]) -> None:
        """Ends the request at the server, which then releases its leases, after its last call.

        `end_tokens`: as for `touch`, of all keys of the request. vLLM does not look up a chunk in
        kvtier that it finds in the engine or in its primary tier, so only this call marks it as
        used.
        """
        if request.has_run:
            self.touch(request, end_tokens)
        request.ended = True
        self.finish_request(request.registration)

    def close(self) -> None:
        self._threads.close(0.5)
        super().close()

    def _queue_lookup(self, request: TierRequest, key: bytes, end_token: int, deadline: float) -> Answer:
        if request.ended or request.registration.settings.skip_load or not self.reachable():
            return self.miss(request, key)
        request.waiting[key] = deadline
        request.new[key] = end_token
        return Answer.UNKNOWN

    def _take_done(self) -> None:
        while self._done:
            batch = self._done.popleft()
            request = batch.request
            if request.ended:
                continue  # the server releases the leases of a request that has ended
            wanted = [key for key in batch.keys if request.waiting.pop(key, None) is not None]
            for key in wanted:
                request.known[key] = batch.found.get(key)
            request.used |= batch.found.keys()
            if any(key in batch.found for key in wanted):
                request.leases += batch.leases
            else:
                self.release_leases(batch.leases)

    # ---- on background threads

    def _run(self, batch: _LookupBatch) -> None:
        try:
            if not batch.request.ended and not self.circuit.is_open and time.monotonic() < batch.deadline:
                batch.request.sent_at |= dict.fromkeys(batch.keys, time.monotonic())
                self._look_up(batch)
        except KVTierError as error:
            self.circuit.open(error)
            self._log.warn("lookup", f"a lookup failed, so its request is computed: {error}")
        finally:
            # If the lookup did not end here, its request would wait for the whole timeout.
            for key in batch.keys:
                batch.request.sent_at.pop(key, None)
            self._done.append(batch)
            self.release(batch.request.registration)

    def _look_up(self, batch: _LookupBatch) -> None:
        most = self._client.max_keys or len(batch.keys)
        for first in range(0, len(batch.keys), most):
            keys = batch.keys[first : first + most]
            until = time.monotonic() + _PIN_SECONDS
            # The server waits for less than the timeout, so that its answer arrives in time.
            wait = max(0.0, batch.deadline - time.monotonic()) * _WAIT_SHARE
            lease = self.lookup_keys(batch.request.registration, keys, wait=wait, prefix=batch.prefix)
            batch.leases += [lease] if lease.id else []
            hits = {
                key: Pin(lease, item, until) for item, key in enumerate(keys) if lease.statuses[item] == KeyStatus.HIT
            }
            batch.found |= hits
            if batch.prefix and len(hits) < len(keys):
                return

    def _touch(self, request: TierRequest, end_tokens: Mapping[bytes, int], until: float) -> None:
        """Marks blocks of each group, until this time on the monotonic clock."""
        groups: dict[bytes, list[bytes]] = {}
        for key in sorted((key for key in end_tokens if key not in request.used), key=end_tokens.__getitem__):
            groups.setdefault(key[-_GROUP_BYTES:], []).append(key)
        try:
            for keys in groups.values():
                if self.circuit.is_open or time.monotonic() >= until:
                    break
                # The server marks the leading keys that it has. Of windows it has the last ones.
                _ = self._touch_prefix(request, keys) or self._touch_prefix(request, keys[::-1])
        except KVTierError as error:
            self.circuit.open(error)
            self._log.warn("touch", f"could not mark blocks as used: {error}")
        finally:
            self.release(request.registration)

    def _touch_prefix(self, request: TierRequest, keys: Sequence[bytes]) -> int:
        """Marks the leading keys that the CPU tier has as used; returns their number."""
        most, present = self._client.max_keys or len(keys), 0
        for first in range(0, len(keys), most):
            batch = keys[first : first + most]
            found = self._client.prefetch(batch, request_id=request.registration.request_id, exclude=_ALL_TIERS)
            request.used.update(batch[: found.present])
            present += found.present
            if found.present < len(batch):
                break
        return present

    def lookup_keys(
        self, request: RequestRegistration, keys: Sequence[bytes], **options: Unpack[LeaseOptions]
    ) -> Lease:
        """As in RequestCalls; also records the server's policy for this kind of request."""
        lease = super().lookup_keys(request, keys, **options)
        if lease.policy is not None:
            if len(self._policies) >= _MAX_KINDS:  # users choose the parameters
                self._policies.clear()
            self._policies[_kind(request.kv_transfer_params or {})] = lease.policy
        return lease


def _kind(params: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (str(name), str(value)[:_VALUE_CHARACTERS] if name == _BY_VALUE else str(bool(value)))
        for name, value in params.items()
    )
