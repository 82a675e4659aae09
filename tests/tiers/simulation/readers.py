"""Simulated readers: clients that look up, read and release, sometimes with wrong ids."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.tiers import errors
from kvtier.tiers.core.call_specs import LookupSpec
from kvtier.tiers.negotiation import TierFilter

from .actors import HOLD_SECONDS, Actors
from .ledger import LeaseRecord
from .lookup_calls import Lookup, Prefetch
from .model import Invariant, label
from .tier_calls import Query
from .tier_settings import tenant_of

__all__ = ["Readers"]


class Readers(Actors):
    """Events of clients that read."""

    def actions(self) -> dict[Callable[[], None], float]:
        is_crowded = self.rng.random() < 0.3  # lookups keep leases, and others wait for room
        return {
            self.look_up: 60 if is_crowded else 16,
            self.prefetch: 2,
            self.query: 1,
            self.read: 5,
            self.release: 1 if is_crowded else 9,
            self.release_twice: 0.5,
            self.release_another_engines_lease: 0.8,
            self.renew: 1.5,
            self.exclude_an_unknown_tier: 0.3,
        }

    def look_up(self) -> None:
        if client := self.pick_client():
            self.world.calls.begin(Lookup(self, client, self._filter()))

    def prefetch(self) -> None:
        if client := self.pick_client():
            self.world.calls.begin(Prefetch(self, client, self._filter()))

    def query(self) -> None:
        if client := self.pick_client():
            self.world.calls.begin(Query(self, client, self._filter()))

    def _filter(self) -> TierFilter:
        """Returns a random tier filter; some exclude one tier, remote tiers, or an unknown tier."""
        luck = self.rng.random()
        if luck < 0.1 and self.world.tiers:
            self.world.saw("tiers left out")
            return TierFilter(names=frozenset([self.rng.choice(self.world.tiers).name]))
        return TierFilter(remote=luck < 0.15)

    def exclude_an_unknown_tier(self) -> None:
        """A filter with an unknown tier is refused."""
        if client := self.pick_client():
            core, tiers = self.world.core, TierFilter(names=frozenset(["nowhere"]))
            keys = self.some_keys(client.session)
            self.world.refused(
                errors.InvalidItem,
                lambda: core.lookup(
                    client.session, keys, LookupSpec(request_id="r1", lease_seconds=0, tiers=tiers), now=0
                ),
            )

    def read(self) -> None:
        """A reader locates its hits and copies them.

        The labels must be those stored for the keys.
        """
        if record := self._pick_lease():
            session = self.any_of(record.client.engine)
            lease = self.world.core.lease(session, record.lease.id)
            spec = record.client.session.namespace
            items = [item for item, block in enumerate(lease.blocks(range(lease.keys))) if block and block.ready]
            every = lease.slots(items, None)
            for rank in range(spec.world_size):
                self.world.must(
                    Invariant.BYTES, every[rank :: spec.world_size] == lease.slots(items, rank), "all ranks"
                )
                for block, slot in zip(lease.blocks(items), lease.slots(items, rank), strict=True):
                    assert block is not None
                    wanted = label(spec.id, block.key, rank)
                    self.world.must(Invariant.BYTES, self.world.memory[slot] == wanted, f"{wanted}: served wrong bytes")
            self.world.saw("reads", bool(items))

    def release(self) -> None:
        if record := self._pick_lease():
            session = self.any_of(record.client.engine)
            del self.world.ledger.leases[record.lease.id]
            self.world.core.release(session, record.lease.id)

    def release_twice(self) -> None:
        """Ending an ended or unknown lease is refused."""
        if client := self.pick_client():
            core, number = self.world.core, self.rng.randrange(1, 50)
            if number not in self.world.ledger.leases:
                self.world.refused(errors.LeaseNotFound, lambda: core.release(client.session, number))
                self.world.saw("leases released twice")

    def release_another_engines_lease(self) -> None:
        record = self._pick_lease()
        stranger = self.session_of_another(record.client.engine) if record is not None else None
        if record is None or stranger is None:
            return
        core, lease_id, later = self.world.core, record.lease.id, self.world.now + 1000
        same_tenant = tenant_of(stranger.namespace.id) == tenant_of(record.client.session.namespace.id)
        refusal = errors.NotOwner if same_tenant else errors.LeaseNotFound
        self.world.refused(refusal, lambda: core.release(stranger, lease_id))
        self.world.refused(refusal, lambda: core.renew(stranger, lease_id, later))
        self.world.saw("strangers' leases released")

    def renew(self) -> None:
        """A lease or store is extended, and never shortened, even if the clock has gone back."""
        later = self.world.now + self.rng.choice(HOLD_SECONDS)
        if record := self._pick_lease():
            self.world.core.renew(self.any_of(record.client.engine), record.lease.id, later)
            record.expires_at = max(record.expires_at, later)
        if stores := self.world.ledger.open_stores():
            store = self.rng.choice(stores)
            self.world.core.renew_store(self.any_of(store.client.engine), store.id, later)
            store.expires_at = max(store.expires_at, later)

    def _pick_lease(self) -> LeaseRecord | None:
        leases = self.world.ledger.leases
        return leases[self.rng.choice(list(leases))] if leases else None
