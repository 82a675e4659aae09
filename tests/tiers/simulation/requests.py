"""A second opinion on requests: what each is owed by which tier, and when its tiers must hear of its end (B3.6-B3.13).

A tier *insists* on a request that it voted REQUEST_LEVEL for. It owes nothing for a block that it holds; it owes one that is on its
way until that job ends; and where it cannot take one the request is short of it, which must be said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.tiers.base import OffloadPolicy
from kvtier.tiers.core.block import Block
from kvtier.tiers.core.requests import Request
from kvtier.tiers.types import EngineSession, Negotiation

from .model import Name

__all__ = ["RequestBook", "RequestRecord", "TierView"]

Place = tuple[int, Name]


@dataclass(frozen=True, slots=True)
class TierView:
    """Where blocks are in the tiers: what was held before the event, what is held or on its way after it."""

    held_before: Sequence[set[Name]]
    held: Sequence[set[Name]]
    is_storing: Callable[[int, Name], bool]


@dataclass(eq=False, slots=True)
class RequestRecord:
    """One life of a request; its id may come again for another."""

    engine: str
    id: str
    session: EngineSession
    request_level_tiers: tuple[int, ...]
    stores: int = 0
    parked: dict[Block, None] = field(default_factory=dict)
    pending_stores: dict[Place, None] = field(default_factory=dict)
    unsure: dict[Place, None] = field(default_factory=dict)
    """Held before the event and on their way after it: which of the two counted is the core's business."""
    vague: bool = False
    """Whether its account is not certain: a tier evicted something of it in the event in which it was looked for."""
    missing: int = 0
    """Blocks that an insisting tier did not get."""
    finished: bool = False
    ended: bool = False
    known: Request | None = None
    """What the core keeps of it, for what it says of itself."""

    @property
    def must_wait(self) -> bool:
        """Whether its tiers may not hear of its end yet."""
        return not self.finished or bool(self.stores or self.parked or self.pending_stores)


class RequestBook:
    """The requests of one life of a server."""

    def __init__(self) -> None:
        self.current: dict[tuple[str, str], RequestRecord] = {}
        self.open: list[RequestRecord] = []
        """All that have not ended, those whose id has been taken over included."""
        self.just_ended: list[RequestRecord] = []
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    def get(self, engine: str, request_id: str) -> RequestRecord | None:
        """Returns the request that goes by an id now."""
        return self.current.get((engine, request_id))

    def begin(self, session: EngineSession, request_id: str, negotiation: Negotiation) -> RequestRecord:
        """A request is announced."""
        votes = enumerate(negotiation.votes, 1)
        request_level_tiers = tuple(number for number, (_, vote) in votes if vote.policy is OffloadPolicy.REQUEST_LEVEL)
        record = RequestRecord(session.engine, request_id, session, request_level_tiers)
        self.current[session.engine, request_id] = record
        self.open.append(record)
        self.begun[request_id] += 1
        return record

    def session_closed(self, session: EngineSession) -> None:
        """What it began is finished, and what was waited for is given up."""
        for record in self.open:
            if record.session is session and not record.finished:
                record.finished = True
                record.missing += len(record.parked)
                record.parked.clear()

    def due(self, record: RequestRecord, names: Iterable[Name], view: TierView) -> None:
        """Ready blocks of a request are there: every insisting tier has them, gets them, or the request is short of them."""
        for name in names:
            for tier in record.request_level_tiers:
                before, now = name in view.held_before[tier - 1], view.is_storing(tier, name)
                if now and before:
                    record.unsure[tier, name] = None
                    record.vague = True
                elif now:
                    record.pending_stores[tier, name] = None
                elif name not in view.held[tier - 1]:
                    record.missing += 1
                    record.vague |= before  # it went in this event, be it before or after it was looked for

    def resolve_parked(self, view: TierView) -> int:
        """Takes note of blocks that nobody writes any more; returns how many."""
        resolved = 0
        for record in self.open:
            for block in [block for block in record.parked if not block.pending]:
                del record.parked[block]
                resolved += 1
                if block.ready:
                    self.due(record, [block.name], view)
                else:
                    record.missing += 1
        return resolved

    def paid(self, tier: int, name: Name, *, stored: bool) -> None:
        """A tier's job on a block has ended."""
        for record in self.open:
            if (tier, name) in record.pending_stores:
                del record.pending_stores[tier, name]
                record.missing += not stored
            record.unsure.pop((tier, name), None)

    def given_up(self, tier: int) -> None:
        """A tier does not come back: whatever it owes is not waited for."""
        for record in self.open:
            for place in [place for place in record.pending_stores if place[0] == tier]:
                del record.pending_stores[place]
                record.missing += 1
            for place in [place for place in record.unsure if place[0] == tier]:
                del record.unsure[place]
                record.vague = True

    def accounts(self) -> list[RequestRecord]:
        """Returns the requests whose accounts may have changed, as far as they are certain."""
        return [record for record in (*self.open, *self.just_ended) if not record.vague]

    def settle(self, finished: Counter[str] | None) -> str | None:
        """Ends what must have ended, given how often a tier has heard of which id; returns what is wrong with that.

        Without tiers nobody hears of it; it ends all the same.
        """
        self.just_ended = []
        for request_id in {record.id: None for record in self.open} | dict.fromkeys(finished or ()):
            mine = [record for record in self.open if record.id == request_id and not record.must_wait]
            news = len(mine) if finished is None else finished[request_id] - self.ended[request_id]
            mine.sort(key=lambda record: bool(record.unsure))
            sure = sum(not record.unsure for record in mine)
            if not sure <= news <= len(mine):
                return f"request {request_id!r} ended {news} times, {sure} to {len(mine)} were right"
            self._end(mine[:news])
        return None

    def _end(self, records: list[RequestRecord]) -> None:
        for record in records:
            record.ended = True
            self.ended[record.id] += 1
            self.open.remove(record)
            self.just_ended.append(record)
            if self.current.get((record.engine, record.id)) is record:
                del self.current[record.engine, record.id]
