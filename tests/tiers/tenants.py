"""A core with several tenants, and shorthands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.operations import run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import LoadFromTier, RemoveFromTier, StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import CPU_TIER, TierSettings
from kvtier.tiers.eviction.quotas import Tenant, TenantShare
from kvtier.tiers.secondary_tier import NamespaceId, Outcome
from kvtier.tiers.types import EngineSession, KeyStatus, NamespaceSpec

PAGE = 4096
ROOMY = 64 * EXTENT


def spec(tenant: str, *, world_size: int = 1) -> NamespaceSpec:
    """Returns a namespace of a tenant; its tag is the first letter of the name, sixteen times."""
    tag = tenant[:1].encode() * 16
    return NamespaceSpec(NamespaceId(tag + b"%d" % world_size * 16), world_size, (PAGE, 3 * PAGE))


def tenant(name: str, *, quota: int = 0, limit: int | None = None, tier: str = CPU_TIER) -> Tenant:
    """Returns a tenant with a share of one tier."""
    limits = {} if limit is None else {tier: limit}
    return Tenant(name, name[:1].encode() * 16, {tier: quota}, limits)


def keys(numbers: Iterable[int], *, group: int = 0) -> list[bytes]:
    """Returns keys of blocks of one size."""
    return [b"%05d" % number + group.to_bytes(4, "big") for number in numbers]


class Rig:
    """A core with tenants; jobs of tiers are done at once."""

    def __init__(
        self,
        *tenants: Tenant,
        tiers: Iterable[ModelTier] = (),
        extents: int = 4,
        ttl: Mapping[str, float] | None = None,
        now: float = 0.0,
    ) -> None:
        self.tiers = list(tiers)
        settings = TierSettings(tenants=tenants, ttl=ttl or {})
        self.core = TierManager(extents * EXTENT, EXTENT, self.tiers, settings=settings, now=now)
        self.core.add_memory(0, extents * EXTENT)
        self.sessions: dict[NamespaceId, EngineSession] = {}

    def session(self, namespace: NamespaceSpec) -> EngineSession:
        if namespace.id not in self.sessions:
            rank = 0 if namespace.world_size > 1 else None
            self.sessions[namespace.id] = self.core.open_session(namespace.id, namespace.id.hex(), rank, namespace)
        return self.sessions[namespace.id]

    def store(
        self, tenant: str, numbers: Iterable[int], *, group: int = 0, chunk: int = 8, retain_for: float = 0.0
    ) -> int:
        """Stores blocks; returns how many could not be retained."""
        session, names, not_retained = self.session(spec(tenant)), keys(numbers, group=group), 0
        for start in range(0, len(names), chunk):
            some = names[start : start + chunk]
            answer = run_to_end(
                self.core.prepare_store(session, some, StoreSpec(lease_seconds=1e9, retain_for=retain_for), now=0)
            )
            not_retained += answer.not_retained
            if answer.store_id is not None:
                run_to_end(self.core.complete_store(session, answer.store_id))
            self.work()
        return not_retained

    def look_up(self, tenant: str, numbers: Iterable[int], *, retain_for: float = 0.0) -> int:
        """Looks up blocks; returns the number of hits."""
        found = run_to_end(
            self.core.lookup(
                self.session(spec(tenant)),
                keys(numbers),
                LookupSpec(prefix=False, lease_seconds=1e9, retain_for=retain_for),
                now=0,
            )
        )
        self.work()
        if found.lease is None:
            return 0
        hits = found.statuses().count(KeyStatus.HIT)
        self.core.release(self.session(spec(tenant)), found.lease.id)
        return hits

    def tick(self, now: float) -> None:
        self.core.tick(now)
        self.work()

    def work(self) -> None:
        while commands := self.core.take_commands():
            for command in commands:
                if isinstance(command, RemoveFromTier):
                    self.tiers[command.tier - 1].remove(command.keys)
                elif isinstance(command, StoreInTier | LoadFromTier):
                    held = self.tiers[command.tier - 1].blocks
                    if isinstance(command, StoreInTier):
                        held.update({block.name: (block.nbytes, ()) for block in command.blocks})
                    self.core.job_finished(command.job_id, [Outcome.DONE] * len(command.blocks))

    def visible(self, tenant: str) -> set[bytes]:
        return {key for key, block in self.core._cpu_tier.blocks_of(spec(tenant).id).items() if block.ready}

    def below(self, tenant: str, tier: int = 0) -> set[bytes]:
        return set(self.core._tier_jobs.secondaries[tier].catalog._entries.get(spec(tenant).id, ()))

    def share(self, tenant: str) -> TenantShare:
        return self.core._cpu_tier.queues.shares.of(spec(tenant).id)
