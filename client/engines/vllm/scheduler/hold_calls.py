"""Calls to servers about holds (claim, publish, renew, release), made on background threads."""

from __future__ import annotations

import operator
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition, Lock
from typing import Any

from .... import (
    Client,
    DeadlineExceeded,
    HoldGone,
    HoldName,
    KeyStatus,
    KVTierError,
    Lease,
    NotClaimedReason,
    PublishStatus,
)
from ....handoff import ClaimedBlocks, ClaimId, HandoffRequest, HeldBlock, PlannedPublication, RemoteRequest
from ..background import BackgroundThreads, Circuit, RateLimitedLog, logger
from ..peers import OWN, Peers
from ..stats import TransferCounters
from .requests import VllmRequest

__all__ = ["HoldCalls"]

_CLAIM_THREADS = 32  # a claim mostly waits until another engine has stored its blocks
_WAIT_SHARE = 0.8
_CONNECT_WITHIN_S = 1.0
_NOTIFY_WITHIN_S = 30.0


@dataclass
class _OpenClaim:
    """A claim that the core has not dropped. `lease`: the granted lease; None before the answer."""

    endpoint: str
    lease: Lease | None = None


class HoldCalls:
    """Implements `HandoffServer`. Public methods run on the scheduler's thread and never block.

    The first hand-off starts the threads, because most engines make no hand-offs.
    """

    def __init__(self, peers: Peers, claim_timeout_s: float, log: RateLimitedLog, counters: TransferCounters) -> None:
        self._peers = peers
        self._wait_s = claim_timeout_s * _WAIT_SHARE
        self._log = log
        self._counters = counters
        self._lock = Lock()
        self._answered = Condition()
        self._open_claims: dict[ClaimId, _OpenClaim] = {}
        self._answers: deque[tuple[ClaimId, ClaimedBlocks | None, float]] = deque()
        self._circuits: defaultdict[str, Circuit] = defaultdict(Circuit)
        # Per endpoint, so that a slow server does not delay claims at other servers.
        self._claim_threads: dict[str, BackgroundThreads] = {}
        # One thread per endpoint, because notifications must not queue behind waiting claims.
        self._notify_threads: dict[str, BackgroundThreads] = {}

    def wait_for_answer(self, seconds: float) -> None:
        """Waits for a claim to end, unless an ended claim was not taken yet."""
        with self._answered:
            if not self._answers:
                self._answered.wait(seconds)

    def answers(self) -> list[tuple[ClaimId, ClaimedBlocks | None, float]]:
        """Returns id, blocks (None: failed, or empty hold) and time of each newly ended claim."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def use(self, peers: Peers) -> None:
        """Makes all later calls with other clients, because the namespace has changed."""
        self._peers = peers

    def close(self) -> None:
        for threads in (*self._claim_threads.values(), *self._notify_threads.values()):
            threads.close(0.5)

    # ---- HandoffServer

    def start_claim(
        self,
        claim: ClaimId,
        request: HandoffRequest,
        remote: RemoteRequest,
        first_positions: Sequence[int],
        min_blocks: int,
    ) -> bool:
        assert isinstance(request, VllmRequest)
        endpoint = self._endpoint_of(remote)
        if endpoint is None:
            self.not_claimed(request, remote, NotClaimedReason.PEER_NOT_LISTED)
            return False
        if not self._reachable(endpoint):
            self._counters.count("claims:unavailable")
            return False
        if endpoint not in self._claim_threads:
            self._claim_threads[endpoint] = BackgroundThreads("claim", self._log, threads=_CLAIM_THREADS)
        with self._lock:
            self._open_claims[claim] = _OpenClaim(endpoint)
        # Only the engine's own server knows this request by name.
        wanted: dict[str, Any] = {
            "request_id": request.server_name if endpoint == OWN else "",
            "first_positions": list(first_positions),
            "min_blocks": min_blocks,
        }
        peers, deadline = self._peers, time.monotonic() + self._wait_s
        self._claim_threads[endpoint].submit(
            lambda: self._claim(claim, peers, endpoint, _hold_of(remote), wanted, deadline)
        )
        return True

    def not_claimed(self, request: HandoffRequest, remote: RemoteRequest, reason: NotClaimedReason) -> None:
        assert isinstance(request, VllmRequest)
        self._counters.count(f"claims:{reason.name.lower()}")
        hold, name = _hold_of(remote), request.server_name
        self._notify_server(OWN, lambda client: client.report_not_claimed(hold, request_id=name, reason=reason))

    def drop_claim(self, claim: ClaimId) -> None:
        with self._lock:
            dropped = self._open_claims.pop(claim, None)
        if dropped is not None and dropped.lease is not None:
            self._notify(dropped.endpoint, dropped.lease.release)

    def renew(self, remotes: Sequence[RemoteRequest]) -> None:
        """Skips servers that have just failed. The next heartbeat tries again."""
        for endpoint, holds in self._by_endpoint(remotes).items():
            if self._reachable(endpoint):
                self._notify_server(endpoint, operator.methodcaller("renew_holds", *holds))

    def release(self, remote: RemoteRequest) -> None:
        for endpoint, holds in self._by_endpoint([remote]).items():
            self._notify_server(endpoint, operator.methodcaller("release_holds", *holds))

    def publish(self, publication: PlannedPublication) -> None:
        def dropped() -> None:
            publication.refused = True

        self._notify_server(OWN, lambda client: self._publish(client, publication), dropped)

    def debug(self, text: str) -> None:
        logger.debug("kvtier: %s", text)

    def warn(self, text: str) -> None:
        self._log.warn("handoff", text)

    # ---- details

    def _endpoint_of(self, remote: RemoteRequest) -> str | None:
        endpoint = self._peers.endpoint_of(remote)
        if endpoint is None:
            self._log.warn(
                "peers",
                f"nothing is pulled from {remote.host}:{remote.port}: this is neither the engine's own server nor in `peers`",
            )
        return endpoint

    def _by_endpoint(self, remotes: Sequence[RemoteRequest]) -> dict[str, list[HoldName]]:
        holds: dict[str, list[HoldName]] = {}
        for remote in remotes:
            endpoint = self._endpoint_of(remote)
            if endpoint is not None:
                holds.setdefault(endpoint, []).append(_hold_of(remote))
        return holds

    def _reachable(self, endpoint: str) -> bool:
        if self._circuits[endpoint].is_open:
            return False
        return endpoint != OWN or self._peers.client(OWN).connected

    def _notify_server(
        self, endpoint: str, call: Callable[[Client], object], dropped: Callable[[], None] = lambda: None
    ) -> None:
        peers = self._peers  # a hold of old weights must not get into the namespace of new weights
        self._notify(endpoint, lambda: call(peers.client(endpoint)), dropped)

    def _notify(self, endpoint: str, call: Callable[[], object], dropped: Callable[[], None] = lambda: None) -> None:
        """Makes a call in the background, or else calls `dropped` there."""
        thread = self._notify_threads.get(endpoint)
        if thread is None:
            thread = self._notify_threads[endpoint] = BackgroundThreads("handoff", self._log)
        queued_at = time.monotonic()
        thread.submit(lambda: self._run_notification(call, queued_at, dropped))

    # ---- on background threads

    def _run_notification(
        self, call: Callable[[], object], queued_at: float, dropped: Callable[[], None] = lambda: None
    ) -> None:
        try:
            # If a server hangs, calls queue up. A call that waited too long is dropped.
            if time.monotonic() < queued_at + _NOTIFY_WITHIN_S:
                call()
            else:
                dropped()
                self._log.warn("handoff-late", "a hand-off call was dropped because the server is too slow")
        except KVTierError as error:
            self._log.warn("handoff-call", f"a hand-off call failed: {error}")

    def _publish(self, client: Client, publication: PlannedPublication) -> None:
        try:
            try:
                status = self._publish_once(client, publication)
            except DeadlineExceeded:
                # The server may have published the hold or not. Publishing it twice is safe.
                status = self._publish_once(client, publication)
        except Exception:
            publication.refused = True
            raise
        publication.refused = status is not PublishStatus.PUBLISHED
        logger.debug("kvtier: request %s: %s", publication.request_id, status.name)
        self._counters.count(f"publications:{status.name.lower()}")

    def _publish_once(self, client: Client, publication: PlannedPublication) -> PublishStatus:
        return client.publish(
            publication.request_id,
            publication.keys,
            publication.positions,
            num_tokens=publication.num_tokens,
            direction=publication.direction,
            hold_for=publication.hold_for,
        ).status

    def _claim(
        self,
        number: ClaimId,
        peers: Peers,
        endpoint: str,
        hold: HoldName,
        wanted: Mapping[str, Any],
        deadline: float,
    ) -> None:
        lease, outcome, begun_at = None, "unavailable", time.monotonic()
        try:
            # Checked again, because an earlier claim in the queue may have opened the circuit.
            if number in self._open_claims and self._reachable(endpoint):
                client = peers.client(endpoint)
                if endpoint != OWN:
                    client.wait_until_connected(_CONNECT_WITHIN_S)
                wait = max(0.0, deadline - time.monotonic())
                lease = client.claim(hold, wait=wait, **wanted)
                outcome = "granted" if lease.id else "empty"
        except HoldGone as error:
            outcome = "gone"
            self.debug(f"{hold.request_id} of {hold.engine_id} cannot be pulled: {error}")
        except KVTierError as error:
            if peers is self._peers:
                self._circuits[endpoint].open(error)
            self._log.warn("claim", f"a claim failed, so its request is computed: {error}")
        finally:
            self._counters.count(f"claims:{outcome}")
            self._counters.observe("claim_seconds", time.monotonic() - begun_at)
            self._record_answer(number, lease)

    def _record_answer(self, number: ClaimId, lease: Lease | None) -> None:
        with self._lock:
            claim = self._open_claims.get(number)
            if claim is not None:
                claim.lease = lease
        if claim is not None:
            claimed = None
            try:
                claimed = _claimed(lease)
            finally:  # also if the server's answer is malformed, because a request waits for it
                with self._answered:
                    self._answers.append((number, claimed, time.monotonic()))
                    self._answered.notify_all()
        elif lease is not None:
            self._run_notification(lease.release, time.monotonic())


def _hold_of(remote: RemoteRequest) -> HoldName:
    return HoldName(remote.engine_id, remote.request_id)


def _claimed(lease: Lease | None) -> ClaimedBlocks | None:
    if lease is None or lease.hold is None:
        return None
    blocks = [
        HeldBlock(
            int.from_bytes(key[-4:], "big"),
            position,
            key,
            item if status == KeyStatus.HIT else None,
            status == KeyStatus.HIT_PENDING,
        )
        for item, (key, position, status) in enumerate(
            zip(lease.keys, lease.hold.positions, lease.statuses, strict=True)
        )
    ]
    return ClaimedBlocks(lease.id, lease.hold.num_tokens, blocks, lease.hold.settled_blocks)
