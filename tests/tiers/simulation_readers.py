"""Readers: clients that look up, read and let go, and some that name what is not theirs."""

from __future__ import annotations

from collections.abc import Callable

from simulation_actors import HOLD_SECONDS, Actors
from simulation_ledger import LeaseRecord
from simulation_model import REQUESTS, Invariant, label

from kvtier.tiers import errors
from kvtier.tiers.leases import KeyStatus

__all__ = ["Readers"]


class Readers(Actors):
    """What clients do that want something."""

    def actions(self) -> dict[Callable[[], None], float]:
        """Returns what can be done, with weights."""
        return {
            self.look_up: 16,
            self.read: 5,
            self.release: 9,
            self.release_twice: 0.5,
            self.release_a_strangers_lease: 0.8,
            self.renew: 1.5,
        }

    def look_up(self) -> None:
        if (client := self.pick_client()) is None:
            return
        ledger, session, keys = self.world.ledger, client.session, self.some_keys(client.session)
        request_id, expires_at = self.rng.choice(REQUESTS), self.world.now + self.rng.choice(HOLD_SECONDS)
        prefix = self.rng.random() < 0.5
        lease = self.world.core.lookup(session, keys, prefix=prefix, request_id=request_id, expires_at=expires_at)
        ledger.asked += len(keys)
        if lease is None:
            return
        statuses = lease.statuses()
        self.world.must(Invariant.COUNTS, len(statuses) == len(keys), "a status per key")
        for status, source in zip(statuses, lease.sources, strict=True):
            ledger.hits[source] += status != KeyStatus.MISS
        ledger.leases[lease.id] = LeaseRecord(
            lease, client, request_id, expires_at, waiting=KeyStatus.HIT_PENDING in statuses
        )
        self.world.saw("hits while pending", KeyStatus.HIT_PENDING in statuses)
        self.world.saw("hits", KeyStatus.HIT in statuses)

    def read(self) -> None:
        """A reader asks where its hits are and copies them; it must be what was stored under those keys."""
        if record := self._pick_lease():
            session = self.any_of(record.client.engine)
            lease = self.world.core.lease(session, record.lease.id)
            spec = record.client.session.namespace
            items = [item for item, status in enumerate(lease.statuses()) if status == KeyStatus.HIT]
            for rank in range(spec.world_size):
                for item, slot in zip(items, lease.slots(items, rank), strict=True):
                    wanted = label(spec.id, lease.items[item].key, rank)
                    self.world.must(Invariant.BYTES, self.world.memory[slot] == wanted, f"{wanted}: served wrong bytes")
            self.world.saw("reads", bool(items))

    def release(self) -> None:
        if record := self._pick_lease():
            session = self.any_of(record.client.engine)
            del self.world.ledger.leases[record.lease.id]
            self.world.core.release(session, record.lease.id)

    def release_twice(self) -> None:
        """A lease that has ended, or never was, is refused."""
        if client := self.pick_client():
            core, number = self.world.core, self.rng.randrange(1, 50)
            if number not in self.world.ledger.leases:
                self.world.refused(errors.LeaseNotFound, lambda: core.release(client.session, number))
                self.world.saw("leases released twice")

    def release_a_strangers_lease(self) -> None:
        record = self._pick_lease()
        stranger = self.stranger_to(record.client.engine) if record is not None else None
        if record is None or stranger is None:
            return
        core, lease_id, later = self.world.core, record.lease.id, self.world.now + 1000
        self.world.refused(errors.NotOwner, lambda: core.release(stranger, lease_id))
        self.world.refused(errors.NotOwner, lambda: core.renew(stranger, lease_id, later))
        self.world.saw("strangers' leases released")

    def renew(self) -> None:
        """A lease or a store is held for longer; never for less, even if the clock has gone back."""
        later = self.world.now + self.rng.choice(HOLD_SECONDS)
        if record := self._pick_lease():
            self.world.core.renew(self.any_of(record.client.engine), record.lease.id, later)
            record.expires_at = max(record.expires_at, later)
        if in_flight := self.world.ledger.in_flight():
            store = self.rng.choice(in_flight)
            self.world.core.renew_store(self.any_of(store.client.engine), store.id, later)
            store.expires_at = max(store.expires_at, later)

    def _pick_lease(self) -> LeaseRecord | None:
        leases = self.world.ledger.leases
        return leases[self.rng.choice(list(leases))] if leases else None
