"""Simulated readers: clients that look up, read and release, sometimes with wrong ids."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.tiers import errors
from kvtier.tiers.core.leases import LookupAnswer
from kvtier.tiers.negotiation import TierFilter
from kvtier.tiers.types import EngineSession, KeyStatus, MissReason

from . import inspect as inside
from .actors import HOLD_SECONDS, Actors
from .ledger import LeaseRecord
from .model import REQUESTS, Invariant, label
from .tier_settings import tenant_of

__all__ = ["Readers"]


class Readers(Actors):
    """Events of clients that read."""

    def actions(self) -> dict[Callable[[], None], float]:
        return {
            self.look_up: 16,
            self.prefetch: 2,
            self.read: 5,
            self.release: 9,
            self.release_twice: 0.5,
            self.release_another_engines_lease: 0.8,
            self.renew: 1.5,
            self.exclude_an_unknown_tier: 0.3,
        }

    def look_up(self) -> None:
        if (client := self.pick_client()) is None:
            return
        ledger, session, keys = self.world.ledger, client.session, self.some_keys(client.session)
        request_id, expires_at = self.rng.choice(REQUESTS), self.world.now + self.rng.choice(HOLD_SECONDS)
        prefix, tiers, min_hits = self.rng.random() < 0.5, self._filter(), self.rng.choice((0, 0, 0, 3))
        if self.rng.random() < 0.5:
            self.world.core.shared_tiers.query(session, keys, tiers, prefix=prefix)
        retain_until = self.retain_until()
        answer = self.world.core.lookup(
            session,
            keys,
            prefix=prefix,
            request_id=request_id,
            expires_at=expires_at,
            tiers=tiers,
            min_hits=min_hits,
            retain_until=retain_until,
        )
        found = [block for block in answer.lease.items if block is not None] if answer.lease is not None else []
        retain_until = self.conversation_used(session, request_id, keys, retain_until)
        self.used(session, found, retain_until, answer.not_retained)
        lease, statuses = answer.lease, answer.statuses()
        ledger.count(statuses, lease.sources if lease is not None else b"")
        seen = statuses.find(KeyStatus.MISS) + 1 if prefix else 0
        self._check_answer(session, keys, answer, request_id, 0 if prefix and min_hits else seen or len(keys))
        self.world.saw("lookups deferred", KeyStatus.RETRY in statuses)
        if lease is None:
            return
        for name in tiers.names:
            left_out = [tier.name for tier in self.world.tiers].index(name) + 1
            self.world.must(Invariant.FOUND, left_out not in lease.sources, f"{name} was excluded, and read")
        pending = [item for item, status in enumerate(statuses) if status == KeyStatus.HIT_PENDING]
        record = LeaseRecord(lease, client, request_id, expires_at, pending, waiting=bool(pending))
        ledger.leases[lease.id] = record
        if pending:
            ledger.waiting.append(record)
        self.world.saw("hits while pending", bool(pending))
        self.world.saw("hits", KeyStatus.HIT in statuses)

    def prefetch(self) -> None:
        """A client prefetches in slices of any size. Each key counts once, and no lease is left."""
        if (client := self.pick_client()) is None:
            return
        core, session, keys = self.world.core, client.session, self.some_keys(client.session)
        tiers, retain_until, now = self._filter(), self.retain_until(), self.world.now
        if self.rng.random() < 0.5:
            core.shared_tiers.query(session, keys, tiers, prefix=True)
        prefetch = core.lookup_handler.begin_prefetch(
            session, keys, request_id=self.rng.choice(REQUESTS), tiers=tiers, retain_until=retain_until
        )
        most = self.rng.choice((1, 3, None))
        while core.lookup_handler.look_up_slice(prefetch, most, expires_at=now + 30, now=now):
            pass
        found = [block for block in prefetch.lease.items if block is not None] if prefetch.lease is not None else []
        answer = core.lookup_handler.end_prefetch(prefetch)
        self.used(session, found, retain_until, answer.not_retained)
        counted = answer.present + answer.started + answer.missing + answer.no_room + answer.unanswered
        self.world.must(Invariant.FOUND, counted == len(keys), f"{answer} for {len(keys)} keys")
        self.world.must(Invariant.FOUND, answer.present + answer.started == len(found), f"{answer}, found {len(found)}")
        self.world.saw("promotions by prefetches", bool(answer.started))

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
                lambda: core.lookup(client.session, keys, prefix=True, request_id="r1", expires_at=0, tiers=tiers),
            )

    def _check_answer(
        self, session: EngineSession, keys: list[bytes], answer: LookupAnswer, request_id: str, looked_at: int
    ) -> None:
        """Checks an answer: present blocks hit, reset blocks miss, misses have a reason."""
        statuses, ledger, namespace = answer.statuses(), self.world.ledger, session.namespace.id
        self.world.must(Invariant.FOUND, len(statuses) == len(keys), "a status per key")
        items = answer.lease.items if answer.lease is not None else []
        old = ledger.gone.get(namespace, set())
        self.world.must(Invariant.RESET, old.isdisjoint(items), "a block of before the reset is served")
        resetting = self.world.core.resetting(session)
        if resetting:
            self.world.saw("lookups during a reset")
            self.world.must(Invariant.RESET, not items, "a lookup has hits during a reset")
        else:
            for key, status in zip(keys[:looked_at], statuses, strict=False):
                block = inside.block(self.world.core, namespace, key)
                there = block is not None and block.ready
                self.world.must(Invariant.FOUND, not there or status == KeyStatus.HIT, f"{key!r} is there")
        if request_id:
            self._check_explanation(session, keys, statuses, request_id)

    def _check_explanation(self, session: EngineSession, keys: list[bytes], statuses: bytes, request_id: str) -> None:
        (known,) = [r for r in self.world.core.explain(request_id) if r.engine == session.engine]
        outcomes = [span.outcome for span in known.lookups[-1].outcomes() for _ in range(span.count)]
        self.world.must(Invariant.FOUND, len(outcomes) == len(keys), "a verdict per key")
        for verdict, status in zip(outcomes, statuses, strict=True):
            agrees = {KeyStatus.MISS: MissReason, KeyStatus.RETRY: type(None)}.get(KeyStatus(status), int)
            self.world.must(Invariant.FOUND, isinstance(verdict, agrees), f"{status} is explained by {verdict}")
        if KeyStatus.MISS in statuses:
            first = statuses.index(KeyStatus.MISS)
            self.world.saw("prefixes too short", outcomes[first] is MissReason.BELOW_THRESHOLD)
            once = (session.namespace.id, keys[first]) in self.world.ledger.stored
            denied = once and outcomes[first] in (MissReason.NEVER_STORED, MissReason.FORMAT_MISMATCH)
            self.world.must(Invariant.FOUND, not denied, f"{keys[first]!r} was stored, and is said not to have been")

    def read(self) -> None:
        """A reader locates its hits and copies them.

        The labels must be those stored for the keys.
        """
        if record := self._pick_lease():
            session = self.any_of(record.client.engine)
            lease = self.world.core.lease(session, record.lease.id)
            spec = record.client.session.namespace
            items = [item for item, block in enumerate(lease.blocks(range(lease.keys))) if block and block.ready]
            for rank in range(spec.world_size):
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
        if in_flight := self.world.ledger.in_flight():
            store = self.rng.choice(in_flight)
            self.world.core.renew_store(self.any_of(store.client.engine), store.id, later)
            store.expires_at = max(store.expires_at, later)

    def _pick_lease(self) -> LeaseRecord | None:
        leases = self.world.ledger.leases
        return leases[self.rng.choice(list(leases))] if leases else None
