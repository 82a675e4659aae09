"""Model of requests: missing cascades per tier, and when tiers must see the end (B3.6-B3.13).

A tier with the vote REQUEST_LEVEL must get every block of the request. A queued block counts as
missing until its job ends. If the tier cannot store a block, the request is incomplete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.requests import Request
from kvtier.tiers.secondary_tier import OffloadPolicy
from kvtier.tiers.types import EngineSession, Negotiation

from .model import Name

__all__ = ["RequestBook", "RequestRecord", "TierView"]

Place = tuple[int, Name]


@dataclass(frozen=True, slots=True)
class TierView:
    """Blocks of the tiers: held before the event, and held or queued after it."""

    held_before: Sequence[set[Name]]
    held: Sequence[set[Name]]
    is_storing: Callable[[int, Name], bool]


@dataclass(eq=False, slots=True)
class RequestRecord:
    """One use of a request id; a later request may reuse it."""

    engine: str
    id: str
    session: EngineSession
    request_level_tiers: tuple[int, ...]
    stores: int = 0
    parked: dict[Block, None] = field(default_factory=dict)
    pending_stores: dict[Place, None] = field(default_factory=dict)
    unsure: dict[Place, None] = field(default_factory=dict)
    """Held before the event and queued after it; the core may have counted either."""
    uncertain: bool = False
    """Whether its count is uncertain: a tier evicted one of its blocks in the same event."""
    missing: int = 0
    """Blocks that a request-level tier did not get."""
    finished: bool = False
    ended: bool = False
    known: Request | None = None
    """The core's state of the request, for its own counts."""

    @property
    def must_wait(self) -> bool:
        """Returns whether its tiers may not see its end yet."""
        return not self.finished or bool(self.stores or self.parked or self.pending_stores)


class RequestBook:
    """The requests of one run of a server."""

    def __init__(self) -> None:
        self.current: dict[tuple[str, str], RequestRecord] = {}
        self.open: list[RequestRecord] = []
        """All that have not ended, including those whose id was reused."""
        self.just_ended: list[RequestRecord] = []
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    def get(self, engine: str, request_id: str) -> RequestRecord | None:
        """Returns the current request of an id."""
        return self.current.get((engine, request_id))

    def named(self, engine: str, request_id: str) -> RequestRecord | None:
        """Returns the request that a call has named; None if the call has ended it.

        A call ends a request of an ended session first.
        """
        self.finish_of_ended_sessions()
        record = self.get(engine, request_id)
        return None if record is not None and record.session.ended and not record.must_wait else record

    def begin(self, session: EngineSession, request_id: str, negotiation: Negotiation) -> RequestRecord:
        """Records the begin of a request."""
        votes = enumerate(negotiation.votes, 1)
        request_level_tiers = tuple(number for number, (_, vote) in votes if vote.policy is OffloadPolicy.REQUEST_LEVEL)
        record = RequestRecord(session.engine, request_id, session, request_level_tiers)
        self.current[session.engine, request_id] = record
        self.open.append(record)
        self.begun[request_id] += 1
        return record

    def finish_of_ended_sessions(self) -> None:
        """Finishes what the core has finished in this event, and drops the awaited blocks."""
        for record in self.open:
            if record.session.ended and not record.finished and record.id not in record.session.requests:
                record.finished = True
                record.missing += len(record.parked)
                record.parked.clear()

    def due(self, record: RequestRecord, names: Iterable[Name], view: TierView) -> None:
        """Records ready blocks, which each request-level tier must have or get."""
        for name in names:
            for tier in record.request_level_tiers:
                before, now = name in view.held_before[tier - 1], view.is_storing(tier, name)
                if now and before:
                    record.unsure[tier, name] = None
                    record.uncertain = True
                elif now:
                    record.pending_stores[tier, name] = None
                elif name not in view.held[tier - 1]:
                    record.missing += 1
                    record.uncertain |= before  # evicted in this event, before or after the check

    def resolve_parked(self, view: TierView, late: Mapping[Block, Sequence[Request]]) -> int:
        """Records the end of stores of parked blocks; returns their number.

        `late`: requests that no slice has told yet.
        """
        resolved = 0
        for record in self.open:
            mine = (record.session, record.id)
            for block in [block for block in record.parked if not block.pending]:
                if any((request.session, request.id) == mine for request in late.get(block, ())):
                    continue
                del record.parked[block]
                resolved += 1
                if block.ready:
                    self.due(record, [block.name], view)
                else:
                    record.missing += 1
        return resolved

    def paid(self, tier: int, name: Name, *, stored: bool) -> None:
        """Records the end of a tier's job on a block."""
        for record in self.open:
            if (tier, name) in record.pending_stores:
                del record.pending_stores[tier, name]
                record.missing += not stored
            record.unsure.pop((tier, name), None)

    def abandoned(self, tier: int) -> None:
        """A tier hangs: its missing blocks are no longer awaited."""
        for record in self.open:
            for place in [place for place in record.pending_stores if place[0] == tier]:
                del record.pending_stores[place]
                record.missing += 1
            for place in [place for place in record.unsure if place[0] == tier]:
                del record.unsure[place]
                record.uncertain = True

    def accounts(self) -> list[RequestRecord]:
        """Returns the requests whose counts may have changed, if they are certain."""
        return [record for record in (*self.open, *self.just_ended) if not record.uncertain]

    def settle(self, finished: Counter[str] | None) -> str | None:
        """Ends requests by the number of ends that a tier saw per id.

        Returns an error text or None.

        Without tiers no tier sees the end, and the request ends as well.
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
