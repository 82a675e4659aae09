"""Simulated flushes, queries of shared tiers, and evictions by operators."""

from __future__ import annotations

from typing import Any, ClassVar

from kvtier.tiers.core.bulk_eviction import Eviction as State
from kvtier.tiers.core.bulk_eviction import EvictionRequest
from kvtier.tiers.core.operations import Operation
from kvtier.tiers.negotiation import TierFilter
from kvtier.tiers.types import TENANT_TAG_BYTES, DurableStatus

from .actors import Actors
from .calls import Call
from .ledger import Client
from .model import SPECS, Invariant
from .tier_settings import tenant_of

__all__ = ["Eviction", "Flush", "Query"]

WAITS = (0, 0, 2, 300)
"""Times that a call waits, in seconds."""


class Flush(Call):
    """A flush. A block that it reports as durable was complete in a tier in one of its steps."""

    kind: ClassVar[str] = "flushes"
    event: ClassVar[str] = "flush"

    def __init__(self, actors: Actors, client: Client) -> None:
        super().__init__(actors, client)
        self.keys = actors.some_keys(self.session)
        self.durable: set[bytes] = set()

    def begin(self) -> Operation[Any]:
        now = self.world.now
        return self.world.core.flush(
            self.session.namespace.id,
            self.keys,
            deadline=now + self.actors.rng.choice(WAITS),
            now=now,
            slice_keys=self.size,
        )

    def step(self) -> bool:
        self._find_durable()
        more = self.next_step(self.world.now)
        self._find_durable()
        self.world.settings_model.takers.add(tenant_of(self.session.namespace.id))
        self.world.saw("flushes that wait", self.waiter is not None)
        if not more:
            must, statuses = self.world.must, self.answer
            must(Invariant.DURABLE, len(statuses) == len(self.keys), "a status per key")
            for key, status in zip(self.keys, statuses, strict=True):
                if status == DurableStatus.DURABLE:
                    must(Invariant.DURABLE, key in self.durable, f"{key!r} was called durable")
                    self.world.saw("called durable")
        return more

    def _find_durable(self) -> None:
        spec = self.session.namespace
        for key in self.keys:
            if any(self.world.holds_whole(tier, spec, key) for tier in self.world.tiers):
                self.durable.add(key)


class Query(Call):
    """A query of the shared tiers before a lookup. It changes nothing but what the core knows."""

    kind: ClassVar[str] = "queries"
    event: ClassVar[str] = "query"

    def __init__(self, actors: Actors, client: Client, tiers: TierFilter) -> None:
        super().__init__(actors, client)
        self.keys, self.tiers = actors.some_keys(self.session), tiers

    def begin(self) -> Operation[Any]:
        rng, now = self.actors.rng, self.world.now
        return self.world.core.query_shared_tiers(
            self.session,
            self.keys,
            self.tiers,
            prefix=rng.random() < 0.5,
            deadline=now + rng.choice(WAITS),
            now=now,
            slice_keys=self.size,
        )

    def step(self) -> bool:
        more = self.next_step(self.world.now)
        self.world.saw("queries that wait", self.waiter is not None)
        return more


class Eviction(Call):
    """An operator evicts blocks or only counts them, and may cancel the call."""

    kind: ClassVar[str] = "evictions on demand"
    event: ClassVar[str] = "evict"

    def __init__(self, actors: Actors) -> None:
        super().__init__(actors, None)
        choose, spec = actors.rng.random, actors.rng.choice(SPECS)
        self.request = EvictionRequest(
            [number for number in range(len(self.world.tiers) + 1) if choose() < 0.7],
            namespace=spec.id if choose() < 0.5 else None,
            tenant_tag=spec.id[:TENANT_TAG_BYTES] if choose() < 0.3 else None,
            unused_since=self.world.environment.latest - actors.rng.choice((0, 2, 40)) if choose() < 0.5 else None,
            max_bytes=actors.rng.choice((1, 1 << 14, 1 << 18)) if choose() < 0.6 else None,
            dry_run=choose() < 0.2,
        )
        self.eviction: State = self.world.core.evict(self.request)

    def begin(self) -> Operation[Any]:
        return self.eviction.run()

    def step(self) -> bool:
        before = {each.tier: each.nbytes for each in self.eviction.tiers}
        evicted = [tier.evictions for tier in self.world.core.stats().tiers]
        more, stats = self.next_step(self.world.now), self.world.core.stats()
        for each in self.eviction.tiers:
            limit = self.request.max_bytes
            fits = limit is None or each.nbytes < limit + self._largest() or each.nbytes == before[each.tier]
            self.world.must(Invariant.RETAINED, fits, f"{each.nbytes} bytes of {limit} were evicted")
            quiet = not self.request.dry_run or stats.tiers[each.tier].evictions == evicted[each.tier]
            self.world.must(Invariant.RETAINED, quiet, "a dry run evicts")
        return more

    def _largest(self) -> int:
        view = self.world.core_view
        entries = [entry.nbytes for here in view.entries for entry in here]
        return max([*entries, *(block.allocated_bytes for block in view.blocks)], default=0)
