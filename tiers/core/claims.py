"""Claim handler: leases the blocks of a hold for another engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count

from ..errors import HoldNotFound
from ..stats.request_log import ClaimOutcome
from ..stats.snapshots import HandoffStats
from ..types import EngineSession, HandoffDirection, HoldName, KeyStatus, Owner
from .block import Block
from .cpu_tier import CpuTier
from .handoff_log import HandoffLog
from .holds import Hold, HoldClaim
from .lookups import LookupHandler
from .operations import Operation

__all__ = ["ClaimHandler"]


class ClaimHandler:
    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        lookups: LookupHandler,
        log: HandoffLog,
        stats: Mapping[HandoffDirection, HandoffStats],
    ) -> None:
        self._cpu_tier = cpu_tier
        self._lookups = lookups
        self._log = log
        self._stats = stats
        self.missed: Counter[ClaimOutcome] = Counter()

    def begin(
        self,
        session: EngineSession,
        owner: Owner,
        hold: Hold,
        first_positions: Sequence[int],
        lease_seconds: float,
        slice_keys: int,
    ) -> HoldClaim:
        """Returns a claim, which `run` performs. Raises LimitExceeded, InvalidItem."""
        self._lookups.check_room(session, len(hold.keys))
        self._lookups.leases.check_grant(session, owner)
        return HoldClaim(session, owner, hold, first_positions, lease_seconds, slice_keys, user=owner.user)

    def run(self, claim: HoldClaim, now: float) -> Operation[HoldClaim]:
        try:
            if len(claim.hold.keys) > claim.slice_keys:
                now = yield None
            while self._claim_slice(claim, now):
                now = yield None
        except BaseException:
            self._abandon(claim)
            raise
        return claim

    def _claim_slice(self, claim: HoldClaim, now: float) -> bool:
        """Leases the hits among the next blocks; returns whether blocks are left."""
        most, expires_at = claim.slice_keys, now + claim.lease_seconds
        claim.session.check_wanted(claim.owner.grant_id)
        hold, start, leases = claim.hold, len(claim.statuses), self._lookups.leases
        if hold.is_over or hold.record.end is not None or (claim.lease is not None and not leases.is_open(claim.lease)):
            raise HoldNotFound("the hold, or the claim's lease, has ended during the claim")
        self._lookups.check_room(claim.session, len(hold.keys) - start)
        held, wanted = hold.items[start : start + most], _wanted(claim, start, start + most)
        statuses = bytes(map(_status, held, wanted))
        claim.statuses += statuses
        claim.settled += sum(block is None or block.ready for block in held)
        self._log.claimed(claim, hold.keys[start : start + most], statuses, now)
        has_more = len(claim.statuses) < len(hold.keys)
        if claim.user is None and has_more:
            claim.user = claim
        hits = {start + item: block for item, block in enumerate(held) if block and statuses[item] == KeyStatus.HIT}
        self._lease(claim, hits, expires_at, now)
        if not has_more:
            self._finish(claim)
        return has_more

    def _abandon(self, claim: HoldClaim) -> None:
        """Ends a claim whose engine gets no answer, and its lease."""
        lease, claim.lease = claim.lease, None
        if lease is not None:
            claim.hold.claims -= 1
            stats = self._stats[claim.hold.direction]
            stats.claimed -= 1
            stats.claimed_bytes -= sum(block.nbytes for block in lease.items if block is not None)
            if self._lookups.leases.is_open(lease):
                self._lookups.end([lease])
        self._log.abandoned(claim)
        self._finish(claim)

    def not_claimed(self, owner: Owner, name: HoldName, outcome: ClaimOutcome, now: float) -> None:
        """Counts and records a request that an engine computes instead of pulling it."""
        self.missed[outcome] += 1
        self._log.not_claimed(owner, name, outcome, now)

    def _lease(self, claim: HoldClaim, hits: Mapping[int, Block], expires_at: float, now: float) -> None:
        """Adds the hits of a slice to the claim's lease; grants the lease at the first hit.

        A pull in parts makes many claims, each with few of the hold's blocks. So the lease has only
        the hits.
        """
        if not hits:
            return
        found, hold, lease, leases = list(hits.values()), claim.hold, claim.lease, self._lookups.leases
        if lease is None:
            lease = leases.grant(claim.owner, expires_at, [], b"", keys=len(hold.keys), now=now, indices={})
            claim.lease = lease
            hold.claims += 1
            self._stats[hold.direction].claimed += 1
        for block in found:
            block.pins += 1
        assert lease.indices is not None
        lease.indices.update(zip(hits, count(len(lease.items))))
        leases.extend(lease, found, bytes(len(found)), all_ready=True)
        lease.expires_at = max(lease.expires_at, expires_at)
        self._cpu_tier.use([block for block in dict.fromkeys(found) if not block.invalidated], claim.user)
        self._stats[hold.direction].claimed_bytes += sum(block.nbytes for block in found)

    def _finish(self, claim: HoldClaim) -> None:
        if claim.user is claim:
            self._cpu_tier.finish(claim)


def _wanted(claim: HoldClaim, start: int, end: int) -> list[bool]:
    """Returns per block whether it is at or behind the first wanted position of its group."""
    keys, positions, first_positions = claim.hold.keys[start:end], claim.hold.positions, claim.first_positions
    if not first_positions:
        return [True] * len(keys)
    groups = (int.from_bytes(key[-4:], "big") for key in keys)
    return [
        group >= len(first_positions) or position >= first_positions[group]
        for group, position in zip(groups, positions[start:end], strict=True)
    ]


def _status(block: Block | None, wanted: bool) -> int:  # noqa: FBT001 - from a list of them
    if not wanted:
        return 0
    if block is None:
        return KeyStatus.MISS
    return KeyStatus.HIT if block.ready else KeyStatus.HIT_PENDING
