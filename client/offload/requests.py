"""What the core remembers of a request between its arrival and its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .engine import EngineRequest, LookupId
from .hits import Found
from .saves import SaveProgress

__all__ = ["Lookup", "OffloadRequest", "Phase"]


class Phase(Enum):
    """Where a request is.

    WAITING: for its first or, after a preemption or a load, next computation. LOADING: workers write into its blocks.
    RUNNING: it computes. ENDING: it has ended while workers write into its blocks. ENDED: only saves of it may be left.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


@dataclass
class Lookup:
    """A question to the server about the blocks of [``start``, ``limit``) tokens; once answered, a pin on what was ``found``.

    ``done_at`` is when the answer came.
    """

    number: LookupId
    start: int
    limit: int
    deadline: float
    found: Found | None = None
    done_at: float = 0.0


@dataclass
class OffloadRequest:
    """One request.

    ``lookup``: what it waits for or may load; ``loading``: what is being loaded. ``offered_from``: the tokens that the engine had
    when it was last told of a hit. ``arriving``: the blocks being loaded, with their keys. ``compute_only``: a load or lookup of it
    failed; it is not tried again.
    """

    engine: EngineRequest
    phase: Phase = Phase.WAITING
    progress: SaveProgress = field(default_factory=SaveProgress)
    lookup: Lookup | None = None
    loading: Lookup | None = None
    offered_from: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    arriving: list[tuple[int, bytes]] = field(default_factory=list)
    compute_only: bool = False
    saves_in_flight: int = 0
