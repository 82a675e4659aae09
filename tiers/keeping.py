"""How tiers keep blocks: by which policy, for how long, and for whom. Data, from the configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .lines import Lines
from .policies import DEFAULT_POLICY, POLICIES
from .shares import Shares, Tenant

__all__ = ["CPU_TIER", "Keeping"]

CPU_TIER = "cpu"


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is configured per name of a tier (the CPU tier is "cpu").

    Attributes:
        eviction: one of `POLICIES`; the default for tiers that are not named.
        ttl: seconds after which a block that is not used goes; never where a tier is not named.
        tenants: who has a share of their own.
        retained_part: how much of each quota, and of what is nobody's quota, requests may retain.
    """

    eviction: Mapping[str, str] = field(default_factory=dict)
    ttl: Mapping[str, float] = field(default_factory=dict)
    tenants: Sequence[Tenant] = ()
    retained_part: float = 0.5

    def check(self, tiers: Collection[str]) -> None:
        """Raises `ValueError` where a tier or a policy is named that does not exist."""
        named = {*self.eviction, *self.ttl}
        for tenant in self.tenants:
            named |= {*tenant.quotas, *tenant.limits}
        for tier in sorted(named - {*tiers}):
            raise ValueError(f"there is no tier {tier!r}; there are {', '.join(sorted(tiers))}")
        for tier, policy in self.eviction.items():
            if policy not in POLICIES:
                raise ValueError(f"tier {tier!r}: there is no policy {policy!r}; there are {', '.join(POLICIES)}")

    def lines(self, tier: str, capacity_bytes: int, now: float) -> Lines[Any]:
        """Returns the empty lines of a tier. Raises `ValueError` where its quotas are more than it has."""
        shares = Shares(tier, capacity_bytes, self.tenants, retained_part=self.retained_part)
        policy = POLICIES[self.eviction.get(tier, DEFAULT_POLICY)]
        return Lines(shares, policy, ttl=self.ttl.get(tier), now=now)
