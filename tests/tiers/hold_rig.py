"""Rig for tests of hand-offs: a core with a prefill and a decode engine."""

from collections.abc import Sequence

from core_rig import SPEC, Rig, keys
from harness.operations import run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.core.holds import Hold, HoldClaim
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.stats.snapshots import HandoffStats
from kvtier.tiers.types import (
    HOLD_ONLY_KEY_PREFIX,
    EngineSession,
    HandoffDirection,
    HoldName,
    NamespaceSpec,
    PublishStatus,
)

NO_STATUS = b"\0"


P2D, D2P = HandoffDirection


PRIVATE = HOLD_ONLY_KEY_PREFIX + b"of a request" + bytes(4)


class HoldRig(Rig):
    """A core with a publisher ("engine") and a reader; all of the CPU tier may be held."""

    def __init__(
        self, *tiers: ModelTier, extents: int = 1, part: float = 1.0, most: int = 100, spec: NamespaceSpec = SPEC
    ) -> None:
        settings = TierSettings(eviction={"cpu": "lru"}, held_part=part, max_holds=most)
        self.core = TierManager(extents * EXTENT, EXTENT, tiers, settings=settings)
        self.core.add_memory(0, extents * EXTENT)
        self.session = self.open("engine", spec, 0 if spec.world_size > 1 else None)
        self.reader = self.open("reader", spec)
        self.namespace = spec.id

    def name(self, request_id: str = "r") -> HoldName:
        return (self.namespace, "engine", request_id)

    def publish(
        self,
        names: Sequence[bytes],
        request_id: str = "r",
        *,
        now: float = 0.0,
        duration: float = 30.0,
        direction: HandoffDirection = P2D,
        session: EngineSession | None = None,
    ) -> Hold | PublishStatus:
        return run_to_end(
            self.core.publish(
                session or self.session,
                request_id,
                names,
                range(len(names)),
                num_tokens=16 * len(names),
                direction=direction,
                duration=duration,
                now=now,
            ),
            now,
        )

    def claim(self, request_id: str = "r", *, now: float = 0.0, first: Sequence[int] = ()) -> HoldClaim:
        claim = self.core.claim(
            self.reader, self.name(request_id), first_positions=first, request_id="mine", lease_seconds=600, now=now
        )
        return run_to_end(claim, now)

    def stats(self, direction: HandoffDirection = P2D) -> HandoffStats:
        return self.core.stats().handoffs[direction]

    def flood(self) -> None:
        """Stores more blocks than fit."""
        for number in range(500, 540):
            self.store(keys(number))
