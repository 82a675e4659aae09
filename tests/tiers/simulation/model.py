"""What the simulated world is made of: tiers that keep labels, namespaces, and the invariants by name.

Bytes are modelled as labels: a slot holds the label of whoever wrote to it last.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvtier.tiers.base import BlockBytes, Entry, Medium, NamespaceId, Outcome, RequestInfo, SecondaryTier, Vote
from kvtier.tiers.negotiation import vote
from kvtier.tiers.types import HOLD_ONLY_KEY_PREFIX, NamespaceSpec

__all__ = [
    "CHAINS",
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
SPECS = (
    NamespaceSpec(NamespaceId(b"A" * 16), world_size=1, part_bytes=(4096, 12288)),
    NamespaceSpec(NamespaceId(b"B" * 16), world_size=2, part_bytes=(8192,)),
    NamespaceSpec(NamespaceId(b"C" * 16), world_size=1, part_bytes=(4096,)),
)
CHAINS = {
    group: [[b"%d.%d" % (chain, n) + group.to_bytes(4, "big") for n in range(32)] for chain in range(3)]
    for group in range(2)
}
"""Per group the keys of three long prompts."""

Name = tuple[NamespaceId, bytes]

EXERCISED = (
    "blocks lost by a tier",
    "blocks of others found",
    "blocks expired",
    "blocks not retained",
    "blocks parked",
    "blocks retained",
    "called durable",
    "cascades done",
    "cascades failed",
    "clock jumped ahead",
    "clock jumped back",
    "clock stood still",
    "crashes",
    "disks full in mid-batch",
    "ended jobs reported again",
    "answers missing",
    "entries expired",
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
    "holds published before their blocks",
    "holds renewed",
    "holds replaced",
    "late completions",
    "late completions by a stranger",
    "leases expired",
    "leases released twice",
    "evictions on demand",
    "lies about sizes found out",
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
    "sessions fallen in mid-store",
    "sessions reopened",
    "slices of work",
    "slots quarantined",
    "stores completed twice",
    "stores expired",
    "strangers' leases released",
    "strangers' stores completed",
    "tiers hung",
    "tiers lied about sizes",
    "too few outcomes",
    "too many outcomes",
    "uses declined",
    "writes after the end",
    "wrong items named",
)
"""What lives must come to, sooner or later: they prove nothing about what they never do."""


class Invariant(enum.StrEnum):
    """What must hold after every step; the value is what people read."""

    SLOTS = "no slot owned twice"
    PINS = "no pinned block evicted"
    OWNERS = "no lease without owner"
    JOBS = "every job ends once"
    APART = "one job at a time on a block"
    CAPACITY = "tiers within capacity"
    FINISH = "finish called once and last"
    OWED = "nothing owed is dropped in silence"
    BYTES = "served bytes = stored bytes"
    COUNTS = "hits + misses = blocks asked"
    FOUND = "what is there is found, what is not explained"
    RESET = "nothing of before a reset is served"
    WAITERS = "who waits is answered"
    REFUSALS = "what is refused changes nothing"
    DURABLE = "what is called durable is there"
    LINE = "what is kept stands in line to go"
    QUOTAS = "no tenant pays within its quota"
    RETAINED = "what is retained stays"
    TTL = "what nobody uses goes, and nothing else"
    HELD = "what is held stays, and no longer than it may"
    PRIVATE = "what only a hold names goes with it"
    LEAKS = "nothing leaks"
    RAISED = "nothing is raised but refusals"


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, text: str) -> None:
        super().__init__(text)
        self.invariant = invariant


class ModelTier(SecondaryTier):
    """Keeps labels; which of its jobs fail is the world's business."""

    type: ClassVar[str] = "model"
    durable: ClassVar[bool] = True

    def __init__(self, name: str, capacity_bytes: int) -> None:
        super().__init__(name, capacity_bytes)
        self.blocks: dict[Name, tuple[int, tuple[str, ...]]] = {}
        self.begun: list[str] = []
        self.finished: list[str] = []
        self.lies: dict[Name, int] = {}
        """Sizes that it reports of blocks, where they are not the true ones."""

    def share(self) -> None:
        """Lets others write to its storage as well, somewhere else."""
        self.shared, self.local, self.medium = True, False, Medium.NETWORK  # type: ignore[misc]

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

    def remove(self, keys: Sequence[Name]) -> None:
        for name in keys:
            self.blocks.pop(name, None)
            self.lies.pop(name, None)

    def close(self) -> None:
        pass

    @property
    def used_bytes(self) -> int:
        """What it holds in truth."""
        return sum(nbytes for nbytes, _ in self.blocks.values())


def private_key(engine_id: str, request_id: str) -> bytes:
    """Returns the name of a request's last block, which is not full."""
    return HOLD_ONLY_KEY_PREFIX + f"{engine_id}.{request_id}".encode() + bytes(4)


def is_hold_only(key: bytes) -> bool:
    """Returns whether only a hold names a block."""
    return key.startswith(HOLD_ONLY_KEY_PREFIX)


@functools.cache
def label(namespace: NamespaceId, key: bytes, rank: int) -> str:
    """Returns what a slot with this part holds."""
    return f"{namespace[:1].decode()}:{key.hex()}:{rank}"
