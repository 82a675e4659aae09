"""What the core wants moved: the loads and saves of one step. Plain values, so that engines can send them to their workers."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BlockRead", "LoadJob", "SaveJob", "StepPlan"]


@dataclass
class BlockRead:
    """Blocks of one lease to load: key ``indices[i]`` of the lease goes into engine block ``block_ids[i]`` of ``groups[i]``.

    ``endpoint``: the server that has granted the lease; empty for the engine's own.
    """

    lease_id: int
    indices: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    endpoint: str = ""


@dataclass
class LoadJob:
    """One request's load. Without ``reads`` it is one that cannot be done: workers report it as failed at once.

    ``request_id`` is the engine's, which waits for it.
    """

    request_id: str
    reads: list[BlockRead] = field(default_factory=list)


@dataclass
class SaveJob:
    """Blocks to store in one go; the core keeps them from reuse until every worker reports ``job_id``.

    ``request_id`` is how the server knows it; empty where they belong to no request any more (lazy mode).
    """

    job_id: int
    request_id: str
    keys: list[bytes] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


@dataclass
class StepPlan:
    """One step's work: its loads are one event and its saves another (B4.4).

    Workers order each behind one mark in their compute: loads behind what may still use a block's last content, saves behind what
    writes the blocks (B4.11). Each job is reported by itself.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
