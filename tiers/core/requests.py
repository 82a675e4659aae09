"""Request table: begins requests, counts their stores, and tells tiers when a request has ended.

An engine begins a request, stores blocks and finishes it. Tiers are notified once: when the engine
has finished the request, the request has no store in flight, and every block for a REQUEST_LEVEL
tier is stored or given up (B3.12).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import LimitExceeded
from ..secondary_tier import OffloadPolicy, RequestInfo, SecondaryTier
from ..types import EngineKey, EngineSession, Negotiation
from .block import Block
from .call_specs import StoreSpec
from .conversations import Conversation
from .waiters import Waiters

__all__ = ["MAX_REQUESTS", "Request", "RequestTable"]

MAX_REQUESTS = 65536
"""Limit of a tenant's requests that have not ended, up to 3 KB each."""

MAX_AWAITED = 1 << 20
"""Limit of the blocks that the requests of a tenant wait for, about 200 bytes each. A request does
not get further blocks stored by `request_level_tiers`."""

MAX_AWAITED_BY_REQUEST = 1 << 16
"""The same limit for one request, which is abandoned in one step: 30 ms."""


@dataclass(slots=True, eq=False)
class Request:
    """A request, from its beginning until the tiers have been notified of its end.

    Attributes:
        retain_for: how long to retain its blocks after each use, in seconds.
        conversation: records the keys that the request uses; None without a conversation.
        request_level_tiers: positions of the tiers that voted REQUEST_LEVEL. Every block of the
            request is stored in these tiers (B3.3).
        stores: number of its stores in flight.
        waiting: blocks that other clients write now; `request_level_tiers` store them later (B3.9).
        pending_stores: number of pending stores in `request_level_tiers`.
        incomplete: number of blocks that one of `request_level_tiers` did not get.
        finished: whether the engine has finished the request.
        ended: whether the tiers have been notified of the end.
    """

    session: EngineSession
    id: str
    negotiation: Negotiation
    request_level_tiers: frozenset[int]
    retain_for: float = 0.0
    conversation: Conversation | None = None
    stores: int = 0
    waiting: set[Block] = field(default_factory=set)
    pending_stores: int = 0
    incomplete: int = 0
    finished: bool = False
    ended: bool = False

    @property
    def user(self) -> tuple[EngineKey, str]:
        return self.session.engine, self.id

    @property
    def settled(self) -> bool:
        return self.finished and not self.stores and not self.waiting and not self.pending_stores


class RequestTable:
    def __init__(self, *, tiers: Sequence[SecondaryTier], on_end: Callable[[Request], None]) -> None:
        """`on_end` is called once per request, when the request has ended (B3.11)."""
        self._tiers = tiers
        self._on_end = on_end
        self._requests: dict[tuple[EngineKey, str], Request] = {}
        self.waiters = Waiters[Request]()
        self._open: Counter[str] = Counter()
        """Per tenant the number of requests that have not ended."""
        self._awaited: Counter[str] = Counter()
        """Per tenant the number of blocks that its requests wait for."""

    def get(self, engine: EngineKey, request_id: str) -> Request | None:
        """Returns a request that has not ended. First finishes it if its session has ended."""
        request = self._requests.get((engine, request_id))
        if request is not None and request.session.ended and not request.finished:
            self.finish(request, abandon=True)
            return self._requests.get((engine, request_id))
        return request

    def retain_until(self, session: EngineSession, spec: StoreSpec, now: float) -> float:
        """Returns the end of the retention that a call asks for, or else its begun request.

        Returns 0 for no retention.
        """
        seconds = spec.retain_for
        if not seconds and (request := self.get(session.engine, spec.request_id)) is not None:
            seconds = request.retain_for
        return now + seconds if seconds else 0.0

    def conversation_of(self, session: EngineSession, request_id: str) -> Conversation | None:
        """Returns the conversation that a begun request named; None if it named none."""
        request = self.get(session.engine, request_id)
        return request.conversation if request is not None else None

    def check_room(self, session: EngineSession) -> None:
        """Raises LimitExceeded if the tenant of a session has too many requests."""
        if self._open[session.tenant] >= MAX_REQUESTS:
            raise LimitExceeded(f"the tenant has {MAX_REQUESTS} requests that are not finished or still stored")

    def negotiate(self, session: EngineSession, info: RequestInfo) -> Request:
        votes = tuple((tier.name, tier.on_new_request(info)) for tier in self._tiers)
        policy = max((vote.policy for _, vote in votes), default=OffloadPolicy.BLOCK_LEVEL)
        request_level_tiers = frozenset(
            index for index, (_, vote) in enumerate(votes, start=1) if vote.policy is OffloadPolicy.REQUEST_LEVEL
        )
        negotiation = Negotiation(policy, votes)
        request = Request(session, info.request_id, negotiation, request_level_tiers, info.retain_for)
        self._requests[session.engine, request.id] = request
        session.requests[request.id] = None
        self._open[session.tenant] += 1
        return request

    def wait_for(self, request: Request, block: Block) -> None:
        if block in request.waiting:
            return
        tenant = request.session.tenant
        if self._awaited[tenant] >= MAX_AWAITED or len(request.waiting) >= MAX_AWAITED_BY_REQUEST:
            request.incomplete += 1
            return
        self._awaited[tenant] += 1
        request.waiting.add(block)
        self.waiters.add(request, block)

    def awaited_by(self, tenant: str) -> int:
        """Returns the number of blocks that the requests of a tenant wait for."""
        return self._awaited[tenant]

    def settle(self, request: Request, block: Block) -> bool:
        """Called when no client writes a block now; returns whether the request waited for it."""
        if block not in request.waiting:
            return False
        request.waiting.discard(block)
        self.waiters.remove(request, block)
        _subtract(self._awaited, request.session.tenant, 1)
        return True

    def finish(self, request: Request, *, abandon: bool = False) -> None:
        """With `abandon`, the request does not wait for blocks that other clients write now."""
        request.finished = True
        request.session.requests.pop(request.id, None)
        if abandon:
            for block in request.waiting:
                self.waiters.remove(request, block)
            _subtract(self._awaited, request.session.tenant, len(request.waiting))
            request.incomplete += len(request.waiting)
            request.waiting.clear()
        self.end_if_settled(request)

    def end_if_settled(self, request: Request) -> None:
        if not request.settled or request.ended:
            return
        request.ended = True
        _subtract(self._open, request.session.tenant, 1)
        self._on_end(request)
        key = (request.session.engine, request.id)
        # The engine may have begun a new request with the same id.
        if self._requests.get(key) is request:
            del self._requests[key]


def _subtract(counts: Counter[str], tenant: str, number: int) -> None:
    counts[tenant] -= number
    if counts[tenant] <= 0:
        del counts[tenant]
