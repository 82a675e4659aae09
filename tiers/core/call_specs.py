"""What a service asks of a lookup or store of the core: one frozen object per operation."""

from __future__ import annotations

from dataclasses import dataclass

from ..secondary_tier import TierFilter

__all__ = ["LookupSpec", "StoreSpec"]

_ALL_TIERS = TierFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Options of the begin of a store, as the core takes them.

    Attributes:
        request_id: the request that stores; empty for none.
        lease_seconds: time after which an incomplete store ends, if the client does not renew it.
        retain_for: seconds during which no tier evicts the blocks, within the retention budget; 0
            for those that the request asked for when it began.
        grant_id: id by which the client can withdraw the store or lease before it knows the answer;
            0 for none.
    """

    request_id: str = ""
    lease_seconds: float = 0.0
    retain_for: float = 0.0
    grant_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSpec(StoreSpec):
    """Options of a lookup, as the core takes them. A prefetch takes the same, but has no lease.

    Attributes:
        prefix: whether every key after the first miss is a miss.
        tiers: excludes tiers.
        min_hits: with `prefix`, the number of leading hits below which all keys are misses.
        deadline: time until which the lookup waits for room, in seconds of the core's clock.
    """

    prefix: bool = True
    tiers: TierFilter = _ALL_TIERS
    min_hits: int = 0
    deadline: float = 0.0
