"""Simulated lookups and prefetches, which run in slices and may wait for room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.block_matcher import OTHER_COST
from kvtier.tiers.core.call_specs import LookupSpec
from kvtier.tiers.core.commands import Waiter
from kvtier.tiers.core.leases import BlockLease
from kvtier.tiers.core.operations import Operation, run_to_end
from kvtier.tiers.core.running_lookup import RunningLookup as State
from kvtier.tiers.negotiation import TierFilter
from kvtier.tiers.types import KeyStatus, MissReason, tenant_of

from . import inspect as inside
from .actors import HOLD_SECONDS, Actors
from .calls import Call
from .ledger import Client, LeaseRecord
from .model import REQUESTS, Invariant
from .tier_settings import tenant_of as name_of

__all__ = ["Lookup", "Prefetch"]

WAITS = (0, 20, 300)
"""Times that a lookup waits for room, in seconds."""


class Lookup(Call):
    """A lookup. Its lease is in the ledger from the first hit on."""

    kind: ClassVar[str] = "lookups"
    event: ClassVar[str] = "look_up"

    def __init__(self, actors: Actors, client: Client, tiers: TierFilter) -> None:
        super().__init__(actors, client)
        self.keys, self.tiers = actors.some_keys(self.session), tiers
        self.request_id, self.seconds = actors.rng.choice(REQUESTS), actors.rng.choice(HOLD_SECONDS)
        self.record: LeaseRecord | None = None
        """The lease in the ledger; None without a hit."""
        self.found = 0
        self.has_missed = False
        self.ticket = 0
        """The order in which lookups began to wait."""
        self.lookup: State | None = None
        """The state of the lookup; None before the first step."""

    def begin(self) -> Operation[Any]:
        core, rng = self.world.core, self.actors.rng
        prefix, retain_for = rng.random() < 0.5, self.actors.retain_for()
        self._query(prefix=prefix)
        operation = core.lookup(
            self.session,
            self.keys,
            LookupSpec(
                request_id=self.request_id,
                prefix=prefix,
                lease_seconds=self.seconds,
                tiers=self.tiers,
                min_hits=rng.choice((0, 0, 0, 3, 5)),
                retain_for=retain_for,
                deadline=self.world.now + rng.choice(WAITS),
            ),
            now=self.world.now,
            slice_keys=self.size * self.actors.rng.choice((1, OTHER_COST)),
        )
        retain_until = self.actors.retain_until(self.session, self.request_id, retain_for)
        self.actors.conversation_used(self.session, self.request_id, self.keys, retain_until)
        return operation

    def _query(self, *, prefix: bool) -> None:
        if self.actors.rng.random() < 0.5:
            now = self.world.now
            run_to_end(
                self.world.core.query_shared_tiers(
                    self.session, self.keys, self.tiers, prefix=prefix, deadline=now, now=now
                )
            )

    def step(self) -> bool:
        if self.operation is None:
            self.operation = self.begin()
            self.lookup = inside.state_of(self.operation, "lookup")
        lookup, must = self._state, self.world.must
        if self.record is not None and not self._is_leased(self.record):
            uncounted = len(self.keys) - lookup.position + len(lookup.retries)
            more = self._look_up()
            must(Invariant.OWNERS, not more and lookup.answer().lease is None, "a lookup continues without its lease")
            self._lose(self.record, uncounted)
            self.world.saw("lookups lost their lease")
            return False
        start, is_broken, lease = lookup.position, lookup.rest is not None, lookup.lease
        promoting, leased = inside.promoting(self.world.core), self._leased_bytes()
        resetting, clock = self.world.core.resetting(self.session), inside.clock(self.world.core)
        not_retained, place = lookup.not_retained, lookup.waiter
        turn = inside.head_of(self.world.core, self.session.namespace.id)
        others = inside.waiting_of(self.world.core, self.session.namespace.id) - {place}
        more = self._look_up()
        keys = self.keys[start : lookup.position]
        fell_short = lookup.lease is None and lease is not None
        items = self._items(lookup.lease or lease, start)
        self._check_slice(start, items, is_broken=is_broken, resetting=bool(resetting))
        found = [block for block in items if block is not None]
        if lookup.lease is None and lookup.prefetch is None:  # there are too few hits
            found = [] if fell_short and not keys else inside.used_since(self.world.core, self.session, keys, clock)
        took = [block for block in found if block.promoting and block not in promoting]
        if lookup.may_wait or lookup.lacks_room or others:
            self._check_room_taken(took, turn, place)
        self.actors.used(
            self.session, list(dict.fromkeys(found)), lookup.retain_until, lookup.not_retained - not_retained
        )
        self.found += len(found)
        if fell_short:
            assert lease is not None
            self._fall_short(lease, start)
        self._count(start, items)
        self._check_part(leased)
        if not more:
            self._end()
        return more

    @property
    def place(self) -> Waiter | None:
        """The place of the lookup in the room queue."""
        return self.lookup.waiter if self.lookup is not None else None

    @property
    def _state(self) -> State:
        assert self.lookup is not None
        return self.lookup

    def _look_up(self) -> bool:
        lookup, lease, rooms = self._state, self._state.lease, self.world.rooms
        expires_at = self.world.now + self.seconds
        old = lease.expires_at if lease is not None else expires_at
        place, has_waited, could_wait = lookup.waiter, self.waiter is not None, lookup.may_wait
        if self.waiter is not None:
            self.world.saw("waits for room timed out", not self.waiter.is_offered)
            rooms.told.discard(self.waiter)
        is_full = inside.is_full_of_waiters(self.world.core, self.session.namespace.id)
        more = self.next_step(self.world.now)
        if place is None and lookup.waiter is not None:
            self.ticket = rooms.next_ticket()
            self.world.saw("lookups waited for room")
        self.world.saw("waits for room refused", is_full and could_wait and not (lookup.may_wait or has_waited))
        self.world.saw("turns yielded", self.waiter is not None and lookup.is_over_budget)
        if place is not None and not more:
            rooms.told.discard(place)
        if lookup.lease is not None:
            now = lookup.lease.expires_at
            self.world.must(Invariant.OWNERS, now in (old, max(old, expires_at)), "a lease that ends at another time")
        return more

    def _is_leased(self, record: LeaseRecord) -> bool:
        return self.world.ledger.leases.get(record.lease.id) is record

    def _items(self, lease: BlockLease | None, start: int) -> list[Block | None]:
        items: list[Block | None] = list(lease.items[start : self._state.position]) if lease is not None else []
        return items + [None] * (self._state.position - start - len(items))

    def _count(self, start: int, items: Sequence[Block | None]) -> None:
        """Updates the ledger by the keys of a slice."""
        lease, ledger, retries = self._state.lease, self.world.ledger, self._state.retries
        pending = []
        for position, block in enumerate(items, start):
            if block is None or lease is None:
                ledger.misses += position not in retries
            elif block.ready:
                ledger.hits[lease.sources[position]] += 1
            else:
                pending.append(position)
        self._update_record(pending, counted=pending)

    def _update_record(self, pending: Sequence[int], *, counted: Sequence[int]) -> None:
        lease, ledger = self._state.lease, self.world.ledger
        if lease is None:
            return
        record = self.record
        if record is None:
            record = self.record = LeaseRecord(lease, self.client, self.request_id, lease.expires_at, [], waiting=False)
            ledger.leases[lease.id] = record
        record.expires_at = lease.expires_at
        record.waiting = record.waiting or bool(pending)
        if counted and record not in ledger.waiting:
            ledger.waiting.append(record)
        record.pending += counted

    def _lose(self, record: LeaseRecord, uncounted: int) -> None:
        """The lease has ended: the hits of the earlier slices are misses, as all other keys."""
        ledger = self.world.ledger
        for block, source in zip(record.lease.items, record.lease.sources, strict=True):
            if block is not None:
                ledger.hits[source] -= 1
                ledger.misses += 1
        ledger.misses += uncounted

    def _fall_short(self, lease: BlockLease, start: int) -> None:
        """There are fewer hits than `min_hits`: the lease has ended, and its hits are misses."""
        self.world.saw("lookups fell short")
        assert self.record is not None
        self._take_back(self.record, lease.items[:start])

    def _take_back(self, record: LeaseRecord, items: Sequence[Block | None]) -> None:
        """The lookup ends its lease, and the hits are misses."""
        ledger, lease = self.world.ledger, record.lease
        for position, block in enumerate(items):
            if position in record.pending:
                ledger.misses += 1
            elif block is not None:
                ledger.hits[lease.sources[position]] -= 1
                ledger.misses += 1
        record.pending.clear()
        del ledger.leases[lease.id]
        self.record = None

    def _check_slice(self, start: int, items: Sequence[Block | None], *, is_broken: bool, resetting: bool) -> None:
        """Checks the answer so far: present blocks hit, reset blocks miss, misses have a reason."""
        lookup, must, namespace = self._state, self.world.must, self.session.namespace.id
        old = self.world.ledger.gone.get(namespace, set())
        must(Invariant.RESET, old.isdisjoint(items), "a block of before the reset is served")
        if lookup.lease is not None:
            names = [tier.name for tier in self.world.tiers]
            left_out = {names.index(name) + 1 for name in self.tiers.names}
            must(Invariant.FOUND, left_out.isdisjoint(lookup.lease.sources), "an excluded tier was read")
        statuses, keys = lookup.answer().statuses()[start : lookup.position], self.keys[start : lookup.position]
        if resetting:
            self.world.saw("lookups during a reset")
            must(Invariant.RESET, not any(items), "a lookup has hits during a reset")
        elif not is_broken and not (lookup.spec.prefix and lookup.spec.min_hits):
            seen = statuses.find(KeyStatus.MISS) + 1 if lookup.spec.prefix else 0
            for position, key in enumerate(keys[: seen or len(keys)], start):
                block = inside.block(self.world.core, namespace, key)
                if block is not None and block.ready and statuses[position - start] != KeyStatus.HIT:
                    must(Invariant.FOUND, self._is_over_part(position), f"{key!r} is there")
        self._check_first_miss(start, statuses)

    def _check_first_miss(self, start: int, statuses: bytes) -> None:
        if self.has_missed or KeyStatus.MISS not in statuses:
            return
        self.has_missed = True
        position = start + statuses.index(KeyStatus.MISS)
        if (outcomes := self._outcomes()) is None:
            return
        once = (self.session.namespace.id, self.keys[position]) in self.world.ledger.stored
        denied = once and outcomes[position] in (MissReason.NEVER_STORED, MissReason.FORMAT_MISMATCH)
        text = f"{self.keys[position]!r} was stored, and is said not to have been"
        self.world.must(Invariant.FOUND, not denied, text)

    def _outcomes(self) -> list[object] | None:
        record = self._state.record
        return [run.outcome for run in record.outcomes() for _ in range(run.count)] if record is not None else None

    def _is_over_part(self, position: int) -> bool:
        """Returns whether the leases of the tenant leave too little for a block that is there."""
        outcomes = self._outcomes()
        has_no_room = outcomes is not None and outcomes[position] is MissReason.NO_ROOM
        wanted = sum(inside.allocated_bytes(self.world.core, self.session.namespace, key) for key in self.keys)
        return has_no_room and self._part < 1 and wanted > self._left()

    @property
    def _part(self) -> float:
        return self.world.settings_model.settings.leased_part

    def _leased_bytes(self) -> int:
        """Returns the bytes that leases of the tenant pin, also those that have just ended."""
        return inside.leased_bytes(self.world.core)[tenant_of(self.session.namespace.id)]

    def _left(self) -> int:
        """Returns the bytes that leases of the tenant may pin more, beside what it pins already."""
        shares = {share.tenant: share.quota_bytes for share in self.world.core_view.stats.tiers[0].shares}
        free = self.world.region_bytes - sum(shares.values())
        quota = shares.get(name_of(self.session.namespace.id), 0)
        tenant = tenant_of(self.session.namespace.id)
        others = inside.granted_bytes(self.world.core)[1][tenant] + inside.only_held_bytes(self.world.core)[tenant]
        alone, together = int(self._part * (quota or free)), max(quota, int((1 + self._part) / 2 * free))
        return min(alone, together - others) - self._leased_bytes()

    def _check_part(self, before: int) -> None:
        """A lookup adds no block beyond the part of the memory that the tenant may pin."""
        if self._part < 1 and self._leased_bytes() > before:
            left = self._left()
            self.world.must(Invariant.ROOM, left >= 0, f"leases pin {-left} bytes too many")

    def _check_room_taken(self, started: Sequence[Block], turn: Waiter | None, place: Waiter | None) -> None:
        """Of the lookups that may wait, only the one whose turn it is takes room.

        `turn`, `place`: the head of the line, and the place of this lookup, before the step.
        """
        if not started or turn is None:
            return
        self.world.saw("room taken after a wait")
        self.world.must(Invariant.ROOM, turn is place, "a lookup takes room before its turn")

    def _end(self) -> None:
        """The client gets the answer."""
        lookup, must = self._state, self.world.must
        statuses, outcomes = lookup.answer().statuses(), self._outcomes()
        must(Invariant.FOUND, len(statuses) == len(self.keys), "a status per key")
        assert outcomes is not None
        must(Invariant.FOUND, len(outcomes) == len(self.keys), "a verdict per key")
        for verdict, status in zip(outcomes, statuses, strict=True):
            agrees = {KeyStatus.MISS: MissReason, KeyStatus.RETRY: type(None)}.get(KeyStatus(status), int)
            must(Invariant.FOUND, isinstance(verdict, agrees), f"{status} is explained by {verdict}")
        if self.request_id and self.slices == 1:
            (known,) = [r for r in self.world.core.explain(self.request_id) if r.engine == self.session.engine]
            must(Invariant.FOUND, known.lookups[-1] is lookup.record, "a lookup that is not explained")
        if lookup.spec.prefix and lookup.spec.min_hits and not lookup.retries:
            enough = not self.found or self.found >= lookup.spec.min_hits or lookup.lease is None
            must(Invariant.FOUND, enough, f"{self.found} hits, fewer than {lookup.spec.min_hits}")
        self.world.saw("prefixes too short", MissReason.BELOW_THRESHOLD in outcomes)
        self.world.saw("lookups deferred", KeyStatus.RETRY in statuses)
        self.world.saw("hits while pending", KeyStatus.HIT_PENDING in statuses)
        self.world.saw("hits", KeyStatus.HIT in statuses)

    def abandon(self) -> None:
        place, record = self.place, self.record
        if record is not None and self._is_leased(record):
            self._take_back(record, record.lease.items)
        elif record is not None:
            self._lose(record, 0)
        super().abandon()
        if place is not None:
            self.world.rooms.told.discard(place)


class Prefetch(Lookup):
    """A prefetch. Each key counts once, and no lease is left."""

    kind: ClassVar[str] = "prefetches"
    event: ClassVar[str] = "prefetch"

    def begin(self) -> Operation[Any]:
        self._query(prefix=True)
        return self.world.core.prefetch(
            self.session,
            self.keys,
            LookupSpec(request_id=self.request_id, tiers=self.tiers, retain_for=self.actors.retain_for()),
            now=self.world.now,
            slice_keys=self.size * self.actors.rng.choice((1, OTHER_COST)),
        )

    def step(self) -> bool:
        self._clock = inside.clock(self.world.core)
        more = super().step()
        self.world.must(Invariant.OWNERS, self._state.lease is None, "a prefetch has a lease")
        if not more:
            answer = self.answer
            counted = answer.present + answer.started + answer.missing + answer.no_room + answer.unanswered
            must, found = self.world.must, answer.present + answer.started
            must(Invariant.FOUND, counted == len(self.keys), f"{answer} for {len(self.keys)} keys")
            must(Invariant.FOUND, found == self.found, f"{answer}, found {self.found}")
            self.world.saw("promotions by prefetches", bool(answer.started))
        return more

    def _items(self, lease: BlockLease | None, start: int) -> list[Block | None]:
        """Returns the block of each key that the slice has used."""
        assert lease is None
        keys = self.keys[start : self._state.position]
        used = {block.key: block for block in inside.used_since(self.world.core, self.session, keys, self._clock)}
        misses = (n for n, key in enumerate(keys) if key not in used and start + n not in self._state.retries)
        end = next(misses, len(keys))  # keys can come again behind the first miss
        return [used.get(key) for key in keys[:end]] + [None] * (len(keys) - end)

    def _count(self, start: int, items: Sequence[Block | None]) -> None:
        pass

    def _check_slice(self, start: int, items: Sequence[Block | None], *, is_broken: bool, resetting: bool) -> None:
        must, namespace = self.world.must, self.session.namespace.id
        old = self.world.ledger.gone.get(namespace, set())
        must(Invariant.RESET, old.isdisjoint(items), "a block of before the reset is prefetched")
        must(Invariant.RESET, not resetting or not any(items), "a prefetch has hits during a reset")

    def _check_part(self, before: int) -> None:
        """A prefetch pins only what it loads."""

    def _end(self) -> None:
        pass
