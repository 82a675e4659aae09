"""What the core of handing over wants of servers, carried out in the background; and what they answer."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from .... import (
    Client,
    DeadlineExceeded,
    HoldGone,
    HoldName,
    InvalidRequest,
    KeyStatus,
    KVTierError,
    Lease,
    LimitExceeded,
    PublishStatus,
)
from .... import HandoffDirection as WireDirection
from ....handoff import ClaimedBlocks, ClaimId, Direction, HandoffRequest, HeldBlock, PlannedPublication, RemoteRequest
from ..background import BackgroundThreads, LimitedLog, logger
from ..peers import OWN, Peers
from ..stats import TransferCounters
from .requests import VllmRequest

__all__ = ["ClaimAnswer", "HoldCalls"]

_THREADS = 8  # all they do is wait: for a peer's last saves
_WAIT_SHARE = 0.8
_CONNECT_WITHIN_S = 1.0
_COOL_DOWN_S = 2.0
_LATE_S = 30.0
_DIRECTIONS = {
    Direction.PREFILL_TO_DECODE: WireDirection.PREFILL_TO_DECODE,
    Direction.DECODE_TO_PREFILL: WireDirection.DECODE_TO_PREFILL,
}


class ClaimAnswer(NamedTuple):
    """What became of a claim; ``claimed`` is None where nothing is held, or nobody could be asked. ``at``: when it came."""

    number: ClaimId
    claimed: ClaimedBlocks | None
    at: float


@dataclass
class _Claim:
    """A claim that somebody wants; ``lease`` is what was granted."""

    endpoint: str
    lease: Lease | None = None


class HoldCalls:
    """The core's ``HandoffServer``. Public methods are called on the scheduler's thread, and none blocks.

    Threads are made when the first request is handed over: most engines never do that.
    """

    def __init__(self, peers: Peers, claim_timeout_s: float, log: LimitedLog, tally: TransferCounters) -> None:
        self._peers = peers
        self._wait_s = claim_timeout_s * _WAIT_SHARE
        self._log = log
        self._tally = tally
        self._lock = Lock()
        self._wanted: dict[ClaimId, _Claim] = {}
        self._answers: deque[ClaimAnswer] = deque()
        self._cool_until: dict[str, float] = {}
        # By server: those that wait for one say nothing of the others.
        self._claims: dict[str, BackgroundThreads] = {}
        # By server, one thread each: what is to be told queues behind nobody who waits.
        self._words: dict[str, BackgroundThreads] = {}

    def answers(self) -> list[ClaimAnswer]:
        """Returns what servers have answered since the last call."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def close(self) -> None:
        """End the threads and the sessions with other servers."""
        for threads in (*self._claims.values(), *self._words.values()):
            threads.close(0.5)
        self._peers.close()

    # ---- what the core asks for

    def start_claim(
        self, claim: ClaimId, request: HandoffRequest, remote: RemoteRequest, first_positions: Sequence[int]
    ) -> bool:
        """See HandoffServer."""
        assert isinstance(request, VllmRequest)
        endpoint = self._endpoint_of(remote)
        if endpoint is None or not self._reachable(endpoint):
            self._tally.count("claims:unavailable")
            return False
        if endpoint not in self._claims:
            self._claims[endpoint] = BackgroundThreads("claim", self._log, threads=_THREADS)
        with self._lock:
            self._wanted[claim] = _Claim(endpoint)
        # A peer's server is told no end of our requests: what it grants is given back by itself.
        name, positions = request.server_name if endpoint == OWN else "", list(first_positions)
        deadline = time.monotonic() + self._wait_s
        self._claims[endpoint].submit(lambda: self._claim(claim, endpoint, _hold_of(remote), name, positions, deadline))
        return True

    def drop_claim(self, claim: ClaimId) -> None:
        """See HandoffServer."""
        with self._lock:
            dropped = self._wanted.pop(claim, None)
        if dropped is not None and dropped.lease is not None:
            self._tell(dropped.endpoint, dropped.lease.release)

    def renew(self, remotes: Sequence[RemoteRequest]) -> None:
        """See HandoffServer; a server that has failed a moment ago is left in peace: there will be another heartbeat."""
        for endpoint, holds in self._by_endpoint(remotes).items():
            if self._reachable(endpoint):
                self._tell_server(endpoint, operator.methodcaller("renew_holds", *holds))

    def release(self, remote: RemoteRequest) -> None:
        """See HandoffServer."""
        for endpoint, holds in self._by_endpoint([remote]).items():
            self._tell_server(endpoint, operator.methodcaller("release_holds", *holds))

    def publish(self, publication: PlannedPublication) -> None:
        """See HandoffServer."""
        self._tell_server(OWN, lambda client: self._publish(client, publication))

    def debug(self, text: str) -> None:
        """See HandoffServer."""
        logger.debug("kvtier: %s", text)

    def warn(self, text: str) -> None:
        """See HandoffServer."""
        self._log.warn("handoff", text)

    # ---- details

    def _endpoint_of(self, remote: RemoteRequest) -> str | None:
        endpoint = self._peers.endpoint_of(remote)
        if endpoint is None:
            self._log.warn(
                "peers",
                f"nothing is pulled from {remote.host}:{remote.port}: it is neither this engine's server nor one of `peers`",
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
        if time.monotonic() < self._cool_until.get(endpoint, 0.0):
            return False
        return endpoint != OWN or self._peers.client(OWN).connected

    def _tell_server(self, endpoint: str, call: Callable[[Client], object]) -> None:
        self._tell(endpoint, lambda: call(self._peers.client(endpoint)))

    def _tell(self, endpoint: str, call: Callable[[], object]) -> None:
        words = self._words.get(endpoint)
        if words is None:
            words = self._words[endpoint] = BackgroundThreads("handoff", self._log)
        told_at = time.monotonic()
        words.submit(lambda: self._say(call, told_at))

    # ---- background threads from here on

    def _say(self, call: Callable[[], object], told_at: float) -> None:
        try:
            # Behind a server that hangs, what is told to it piles up; nobody cares any more when it comes so late.
            if time.monotonic() < told_at + _LATE_S:
                call()
            else:
                self._log.warn(
                    "handoff-late", "a server was not told of requests that are handed over: it takes too long"
                )
        except KVTierError as error:
            self._log.warn("handoff-call", f"a server could not be told of a request that is handed over: {error}")

    def _publish(self, client: Client, publication: PlannedPublication) -> None:
        try:
            status = self._publish_once(client, publication)
        except DeadlineExceeded:
            # Whether it was heard or not: a peer would wait for it, and once more under the same name does no harm.
            status = self._publish_once(client, publication)
        logger.debug("kvtier: request %s: %s", publication.request_id, status.name)
        self._tally.count(f"publications:{status.name.lower()}")

    def _publish_once(self, client: Client, publication: PlannedPublication) -> PublishStatus:
        return client.publish(
            publication.request_id,
            publication.keys,
            publication.positions,
            num_tokens=publication.num_tokens,
            direction=_DIRECTIONS[publication.direction],
            hold_for=publication.hold_for,
        ).status

    def _claim(
        self,
        number: ClaimId,
        endpoint: str,
        hold: HoldName,
        request_name: str,
        first_positions: Sequence[int],
        deadline: float,
    ) -> None:
        lease, outcome, begun_at = None, "unavailable", time.monotonic()
        try:
            # It may have queued behind others that found out that the server does not answer.
            if self._is_wanted(number) and self._reachable(endpoint):
                client = self._peers.client(endpoint)
                if endpoint != OWN:
                    client.wait_until_connected(_CONNECT_WITHIN_S)
                wait = max(0.0, deadline - time.monotonic())
                lease = client.claim(hold, request_id=request_name, first_positions=first_positions, wait=wait)
                outcome = "granted" if lease.id else "empty"
        except HoldGone as error:
            outcome = "gone"
            self.debug(f"{hold.request_id} of {hold.engine_id} cannot be pulled: {error}")
        except KVTierError as error:
            if not isinstance(error, (InvalidRequest, LimitExceeded)):
                self._cool_until[endpoint] = time.monotonic() + _COOL_DOWN_S
            self._log.warn("claim", f"a claim failed, its request is computed instead: {error}")
        finally:
            self._tally.count(f"claims:{outcome}")
            self._tally.observe("claim_seconds", time.monotonic() - begun_at)
            self._answered(number, lease)

    def _is_wanted(self, number: ClaimId) -> bool:
        with self._lock:
            return number in self._wanted

    def _answered(self, number: ClaimId, lease: Lease | None) -> None:
        with self._lock:
            wanted = self._wanted.get(number)
            if wanted is not None:
                wanted.lease = lease
        if wanted is not None:
            self._answers.append(ClaimAnswer(number, _claimed(lease), time.monotonic()))
        elif lease is not None:
            self._say(lease.release, time.monotonic())


def _hold_of(remote: RemoteRequest) -> HoldName:
    return HoldName(remote.engine_id, remote.request_id)


def _claimed(lease: Lease | None) -> ClaimedBlocks | None:
    if lease is None or lease.hold is None:
        return None
    blocks = [
        HeldBlock(int.from_bytes(key[-4:], "big"), position, key, item if status == KeyStatus.HIT else None)
        for item, (key, position, status) in enumerate(
            zip(lease.keys, lease.hold.positions, lease.statuses, strict=True)
        )
    ]
    return ClaimedBlocks(lease.id, lease.hold.num_tokens, blocks)
