"""How tiers keep blocks: by which policy, for how long, and for whom. Data, from the configuration."""

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
    """What is configured per name of a tier (the CPU tier is "cpu").

    Attributes:
        eviction: one of `POLICIES`; the default for tiers that are not named.
        admission: what tiers below the CPU tier take in, one of `ADMISSION`; likewise.
        ttl: seconds after which a block that is not used goes; never where a tier is not named.
        tenants: who has a share of their own.
        retained_part: how much of each quota, and of what is nobody's quota, requests may retain.
        held_part: how much of these, in the CPU tier, holds may pin.
        spare_part: how much of the CPU tier is made free ahead at most, for the next store.
        max_holds: how many requests of one tenant may be held.
        estimates: whether it is estimated what tiers of other sizes would answer.
    """

    eviction: Mapping[str, str] = field(default_factory=dict)
    admission: Mapping[str, str] = field(default_factory=dict)
    ttl: Mapping[str, float] = field(default_factory=dict)
    tenants: Sequence[Tenant] = ()
    retained_part: float = 0.5
    held_part: float = 0.25
    spare_part: float = 1 / 64
    max_holds: int = 4096
    estimates: bool = True

    def check(self, tiers: Collection[str]) -> None:
        """Raises `ValueError` where a tier or a policy is named that does not exist."""
        if CPU_TIER in self.admission:
            raise ValueError("the CPU tier takes in everything: there is nothing to admit by")
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
        """Returns what makes the admission filter of a tier; None where it takes in everything."""
        return ADMISSION[self.admission.get(tier, DEFAULT_ADMISSION)]

    def new_queues(self, tier: str, capacity_bytes: int, now: float) -> EvictionQueues[Any]:
        """Returns the empty lines of a tier. Raises `ValueError` where its quotas are more than it has."""
        shares = Quotas(tier, capacity_bytes, self.tenants, retained_part=self.retained_part)
        policy = POLICIES[self.eviction.get(tier, DEFAULT_POLICY)]
        return EvictionQueues(shares, policy, ttl=self.ttl.get(tier), now=now)
