"""Building blocks of the simulated world: tiers that store labels, namespaces, and invariants.

Bytes are modelled as labels: a slot has the label of its last writer.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvtier.tiers.negotiation import vote
from kvtier.tiers.secondary_tier import (
    BlockBytes,
    Entry,
    Medium,
    NamespaceId,
    Outcome,
    RequestInfo,
    SecondaryTier,
    Vote,
)
from kvtier.tiers.types import HOLD_ONLY_KEY_PREFIX, NamespaceSpec

__all__ = [
    "CHAINS",
    "CONVERSATIONS",
    "EXERCISED",
    "EXTENT",
    "HELD_REQUESTS",
    "REQUESTS",
    "SPECS",
    "Invariant",
    "ModelTier",
    "Name",
    "Violation",
    "is_hold_only",
    "label",
    "private_key",
]

EXTENT = 64 << 10
REQUESTS = ("", "r1", "r2", "r3")
HELD_REQUESTS = ("h1", "h2")
CONVERSATIONS = ("", "", "c1", "c2", "c3", "c4")
SPECS = (
    NamespaceSpec(NamespaceId(b"A" * 32), world_size=1, part_bytes=(4096, 12288)),
    NamespaceSpec(NamespaceId(b"B" * 32), world_size=2, part_bytes=(8192,)),
    NamespaceSpec(NamespaceId(b"C" * 32), world_size=1, part_bytes=(4096, 12288)),
)
CHAINS = {
    group: [[b"%d.%d" % (chain, n) + group.to_bytes(4, "big") for n in range(32)] for chain in range(3)]
    for group in range(2)
}
"""Per group the keys of three long prompts."""

Name = tuple[NamespaceId, bytes]

EXERCISED = (
    "blocks lost by a tier",
    "damaged blocks",
    "damaged blocks with pins",
    "wrong blocks in a tier",
    "blocks of other servers found",
    "blocks evicted by a shared store",
    "blocks evicted by a shared store",
    "blocks expired",
    "blocks gathered",
    "blocks not retained",
    "blocks parked",
    "blocks retained",
    "called durable",
    "cascades done",
    "cascades failed",
    "clock jumped ahead",
    "clock jumped back",
    "clock stopped",
    "crashes",
    "disks full during a batch",
    "events lost",
    "events read",
    "ended jobs reported again",
    "answers missing",
    "entries expired",
    "extents passed on",
    "extents retired",
    "extents that stayed",
    "holds that gave up pinned blocks",
    "leases ended in retiring extents",
    "retained blocks evicted with their extent",
    "stores ended in retiring extents",
    "evictions cpu",
    "evictions far",
    "evictions near",
    "finished while blocks are owed",
    "finished while blocks are parked",
    "hits",
    "hits while pending",
    "holds claimed",
    "holds claimed too late",
    "holds declined",
    "holds expired",
    "holds that expire in slices",
    "blocks settled in slices",
    "holds published before their blocks",
    "holds renewed",
    "holds replaced",
    "holds waited for in parts",
    "late completions",
    "late completions by a stranger",
    "leases expired",
    "leases released twice",
    "evictions on demand abandoned",
    "evictions on demand in slices",
    "wrong sizes detected",
    "memory came late",
    "no room",
    "parked blocks resolved",
    "parts failed",
    "policy arc",
    "policy forecast",
    "policy lru",
    "policy mq",
    "lookups deferred",
    "lookups during a reset",
    "prefixes too short",
    "resets that wait",
    "tiers left out",
    "promotions by prefetches",
    "blocks deleted",
    "blocks demoted",
    "blocks of several conversations kept",
    "blocks released",
    "blocks retained by conversation",
    "conversations forgotten",
    "retention refused",
    "tiers recovered",
    "tiers stalled",
    "tiers asked",
    "promotions done",
    "promotions failed",
    "quarantine lifted",
    "ranks died between prepare and commit",
    "reads",
    "requests cut short",
    "room made ahead",
    "room made by another tenant",
    "sessions ended during a store",
    "sessions reopened",
    "slices of work",
    "slots quarantined",
    "stores completed twice",
    "stores expired",
    "strangers' leases released",
    "strangers' stores completed",
    "tiers hung",
    "wrong sizes reported",
    "too few outcomes",
    "too many outcomes",
    "uses declined",
    "writes after the end",
    "wrong items named",
    "actions on conversations abandoned",
    "actions on conversations in slices",
    "claims abandoned",
    "claims ended with their hold or lease",
    "claims in slices",
    "completions continued after their session",
    "completions in slices",
    "events between slices",
    "flushes abandoned",
    "flushes in slices",
    "flushes that wait",
    "queries abandoned",
    "queries in slices",
    "queries that wait",
    "holds ended during their publication",
    "lookups abandoned",
    "lookups fell short",
    "lookups in slices",
    "lookups lost their lease",
    "lookups waited for room",
    "prefetches abandoned",
    "prefetches in slices",
    "preparations abandoned",
    "preparations in slices",
    "publications abandoned",
    "publications in slices",
    "room taken after a wait",
    "stores ended during their preparation",
    "turns of several tenants",
    "turns yielded",
    "waits for room refused",
    "waits for room timed out",
    "restarts",
    "restarts during a reset",
    "restarts of restarts",
    "restarts with writers",
    "reads after a restart",
    "stores after a restart",
    "records refused",
    "records torn",
    "blocks lost with their records",
)
"""Events that must occur in a large number of runs."""


class Invariant(enum.StrEnum):
    """Invariants that are checked after every step; the value is their description."""

    SLOTS = "no slot owned twice"
    PINS = "no pinned block evicted"
    LEASED = "the bytes that leases pin add up"
    OWNERS = "no lease without owner"
    BOOKS = "kept counts and indexes are right"
    JOBS = "every job ends once"
    APART = "one job at a time on a block"
    CAPACITY = "tiers within capacity"
    FINISH = "finish called once and last"
    OWED = "missing blocks are reported"
    BYTES = "served bytes = stored bytes"
    COUNTS = "hits + misses = keys of lookups"
    FOUND = "stored blocks are found, misses are explained"
    RESET = "no block from before a reset is served"
    WAITERS = "waiting calls are answered"
    REFUSALS = "refused calls change nothing"
    DURABLE = "durable blocks are in a tier"
    DAMAGE = "readers do not find damaged blocks"
    LINE = "eviction queues have all evictable blocks"
    QUOTAS = "no tenant loses blocks within its quota"
    RETAINED = "retained blocks stay"
    TTL = "only unused blocks expire"
    HELD = "held blocks stay until their hold ends"
    PRIVATE = "blocks that only a hold names end with it"
    EVENTS = "events say which blocks each tier has"
    CONVERSATIONS = "conversations have the keys of their requests"
    LEAKS = "nothing leaks"
    ROOM = "lookups that wait for room take turns"
    RETIRING = "few extents retire, and their pins end"
    RESTART = "a restart recovers exactly the blocks that readers find"
    RAISED = "only refusals are raised"


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, text: str) -> None:
        super().__init__(text)
        self.invariant = invariant


class ModelTier(SecondaryTier):
    """A tier that stores labels; the world decides which of its jobs fail."""

    type: ClassVar[str] = "model"
    durable: ClassVar[bool] = True

    def __init__(self, name: str, capacity_bytes: int) -> None:
        super().__init__(name, capacity_bytes)
        self.blocks: dict[Name, tuple[int, tuple[str, ...]]] = {}
        self.begun: list[str] = []
        self.finished: list[str] = []
        self.lies: dict[Name, int] = {}
        """Sizes of blocks that it misreports."""

    def share(self, gather_bytes: int) -> None:
        """Lets other servers write to its storage, which may evict blocks at any time."""
        self.gather_bytes = gather_bytes
        self.shared, self.local, self.medium = True, False, Medium.NETWORK  # type: ignore[misc]
        self.durable, self.parallel_stores = False, 2  # type: ignore[misc]

    def on_new_request(self, request: RequestInfo) -> Vote:
        self.begun.append(request.request_id)
        return vote(self.rules, request)

    def on_request_finished(self, request_id: str) -> None:
        self.finished.append(request_id)

    def entries(self) -> Iterator[Entry]:
        for name, (nbytes, _) in () if self.shared else self.blocks.items():
            yield Entry(*name, self.lies.get(name, nbytes))

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        raise AssertionError("the world moves labels itself")

    load = store

    def put(self, spec: NamespaceSpec, key: bytes, part_bytes: int) -> None:
        """Stores a whole block, as an earlier or another server."""
        parts = tuple(label(spec.id, key, rank) for rank in range(spec.world_size))
        self.remove([(spec.id, key)])
        self.blocks[spec.id, key] = (part_bytes * spec.world_size, parts)

    def remove(self, keys: Sequence[Name]) -> None:
        for name in keys:
            self.blocks.pop(name, None)
            self.lies.pop(name, None)

    def close(self) -> None:
        pass

    @property
    def used_bytes(self) -> int:
        """Bytes that it really holds."""
        return sum(nbytes for nbytes, _ in self.blocks.values())


def private_key(engine_id: str, request_id: str) -> bytes:
    """Returns the key of a request's last block, which is partial."""
    return HOLD_ONLY_KEY_PREFIX + f"{engine_id}.{request_id}".encode() + bytes(4)


def is_hold_only(key: bytes) -> bool:
    """Returns whether only a hold can name a block."""
    return key.startswith(HOLD_ONLY_KEY_PREFIX)


@functools.cache
def label(namespace: NamespaceId, key: bytes, rank: int) -> str:
    """Returns the label of a slot with this part."""
    return f"{namespace[:1].decode()}:{key.hex()}:{rank}"
