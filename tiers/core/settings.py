"""Settings of the tiers: eviction policy, admission, time to live, quotas and budgets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..eviction import DEFAULT_POLICY, POLICIES
from ..eviction.admission import ADMISSION, DEFAULT_ADMISSION, Admission
from ..eviction.queues import EvictionQueues
from ..eviction.quotas import Quotas, Tenant

__all__ = ["CPU_TIER", "TierSettings"]

CPU_TIER = "cpu"


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Settings, per tier name ("cpu" is the CPU tier).

    Attributes:
        eviction: one of `POLICIES` per tier; default: `DEFAULT_POLICY`.
        admission: one of `ADMISSION` per secondary tier; default: `DEFAULT_ADMISSION`.
        ttl: seconds without use after which a block is dropped; default: never.
        tenants: tenants with a quota or a limit.
        retained_part: fraction of each quota and of the memory without quota that may be retained.
        held_part: fraction of each quota and of the memory without quota in the CPU tier that holds
            may pin.
        leased_part: fraction of a quota, or of the memory without quota in the CPU tier, that the
            leases of one tenant may pin; see `PinBudget` for stores.
        spare_part: largest fraction of the CPU tier that is freed in advance of a store.
        max_holds: limit for the holds of one tenant.
        estimates: whether to estimate the hit ratio of other tier sizes.
        content_bytes: limit of the memory for the token ids of blocks, for events.
        pool_starts: offset at which each memory pool of the CPU tier begins: the common one, then
            those of the tenants with `has_pool`, in their order.
    """

    eviction: Mapping[str, str] = field(default_factory=dict)
    admission: Mapping[str, str] = field(default_factory=dict)
    ttl: Mapping[str, float] = field(default_factory=dict)
    tenants: Sequence[Tenant] = ()
    retained_part: float = 0.5
    held_part: float = 0.25
    leased_part: float = 1.0
    spare_part: float = 1 / 64
    max_holds: int = 4096
    estimates: bool = True
    content_bytes: int = 0
    pool_starts: Sequence[int] = (0,)

    def check(self, tiers: Collection[str]) -> None:
        """Raises `ValueError` if a tier or policy does not exist."""
        if CPU_TIER in self.admission:
            raise ValueError("the CPU tier stores every block and cannot have an admission filter")
        named = {*self.eviction, *self.admission, *self.ttl}
        for tenant in self.tenants:
            named |= {*tenant.quotas, *tenant.limits}
        for tier in sorted(named - {*tiers}):
            raise ValueError(f"there is no tier {tier!r}; there are {', '.join(sorted(tiers))}")
        for chosen, there_are in ((self.eviction, POLICIES), (self.admission, ADMISSION)):
            for tier, policy in chosen.items():
                if policy not in there_are:
                    raise ValueError(f"tier {tier!r}: there is no policy {policy!r}; there are {', '.join(there_are)}")

    def new_admission(self, tier: str) -> Callable[[], Admission] | None:
        """Returns the factory of a tier's admission filter; None if it admits all blocks."""
        return ADMISSION[self.admission.get(tier, DEFAULT_ADMISSION)]

    def new_queues(self, tier: str, capacity_bytes: int, now: float) -> EvictionQueues[Any]:
        """Returns empty queues. Raises `ValueError` if the quotas exceed the tier's capacity."""
        shares = Quotas(tier, capacity_bytes, self.tenants, retained_part=self.retained_part)
        policy = POLICIES[self.eviction.get(tier, DEFAULT_POLICY)]
        return EvictionQueues(shares, policy, ttl=self.ttl.get(tier), now=now)
