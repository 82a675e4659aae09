"""Requests: how each is offloaded, and when its tiers may be told that it is over.

A request is announced, stores blocks, and is finished by its engine. Its tiers hear of the end once: when the engine has
finished it, no store of it is in flight, and every block that a REQUEST_LEVEL tier asked for has been stored or given up (B3.12).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..base import OffloadPolicy, RequestInfo, SecondaryTier
from ..errors import LimitExceeded
from ..types import EngineKey, EngineSession, Negotiation
from .block import Block

__all__ = ["MAX_REQUESTS", "Request", "RequestTable"]

MAX_REQUESTS = 65536
"""Most requests that one session may have begun and not finished."""


@dataclass(slots=True, eq=False)
class Request:
    """What is remembered of a request until its tiers have been told of its end.

    Attributes:
        retain_for: for how many seconds its blocks are to stay, from each use on.
        insisting: indices of the tiers that asked for REQUEST_LEVEL: they get every block of it (B3.3).
        stores: stores in flight on its behalf.
        waiting: blocks that somebody else is writing, to be cascaded to the insisting tiers when they are there (B3.9).
        owed: blocks on their way to insisting tiers, once per tier.
        incomplete: blocks that an insisting tier asked for and did not get.
        finished: whether its engine has finished it.
        ended: whether its tiers have been told.
    """

    session: EngineSession
    id: str
    negotiation: Negotiation
    request_level_tiers: frozenset[int]
    retain_for: float = 0.0
    stores: int = 0
    waiting: set[Block] = field(default_factory=set)
    pending_stores: int = 0
    incomplete: int = 0
    finished: bool = False
    ended: bool = False

    @property
    def user(self) -> tuple[EngineKey, str]:
        """What eviction policies know it by."""
        return self.session.engine, self.id

    @property
    def settled(self) -> bool:
        """Whether nothing more is going to be stored for it."""
        return self.finished and not self.stores and not self.waiting and not self.pending_stores


class RequestTable:
    """The requests that are not over yet."""

    def __init__(self, *, tiers: Sequence[SecondaryTier], on_end: Callable[[Request], None]) -> None:
        """`on_end` is called once per request: when it has settled, before its state is dropped (B3.11)."""
        self._tiers = tiers
        self._on_end = on_end
        self._requests: dict[tuple[EngineKey, str], Request] = {}
        self._waiting: dict[Block, list[Request]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, engine: EngineKey, request_id: str) -> Request | None:
        """Returns a request that was begun, and is not over."""
        return self._requests.get((engine, request_id))

    def check_room(self, session: EngineSession) -> None:
        """Raises LimitExceeded if a session has begun too many that it never finished."""
        if len(session.requests) >= MAX_REQUESTS:
            raise LimitExceeded(f"the session has {MAX_REQUESTS} requests that it has not finished")

    def negotiate(self, session: EngineSession, info: RequestInfo) -> Request:
        """Registers a request and asks every tier for its vote."""
        votes = tuple((tier.name, tier.on_new_request(info)) for tier in self._tiers)
        policy = max((vote.policy for _, vote in votes), default=OffloadPolicy.BLOCK_LEVEL)
        request_level_tiers = frozenset(
            index for index, (_, vote) in enumerate(votes, start=1) if vote.policy is OffloadPolicy.REQUEST_LEVEL
        )
        negotiation = Negotiation(policy, votes)
        request = Request(session, info.request_id, negotiation, request_level_tiers, info.retain_for)
        self._requests[session.engine, request.id] = request
        session.requests.add(request.id)
        return request

    def wait_for(self, request: Request, block: Block) -> None:
        """Parks a block that is being written until it settles."""
        if block not in request.waiting:
            request.waiting.add(block)
            self._waiting.setdefault(block, []).append(request)

    def awaited(self, blocks: Sequence[Block]) -> list[Block]:
        """Returns those of these blocks that a request waits for."""
        return [block for block in blocks if block in self._waiting] if self._waiting else []

    def settled(self, block: Block) -> list[Request]:
        """Takes note that a block is not being written any more; returns the requests that it was parked for."""
        requests = self._waiting.pop(block, [])
        for request in requests:
            request.waiting.discard(block)
        return requests

    def finish(self, request: Request, *, give_up: bool = False) -> None:
        """Takes note that the engine has finished a request; with `give_up` nothing is waited for that others are writing."""
        request.finished = True
        request.session.requests.discard(request.id)
        if give_up:
            for block in list(request.waiting):
                self._waiting[block].remove(request)
                if not self._waiting[block]:
                    del self._waiting[block]
            request.incomplete += len(request.waiting)
            request.waiting.clear()
        self.end_if_settled(request)

    def end_if_settled(self, request: Request) -> None:
        """Tells of the end of a request, if that has come."""
        if not request.settled or request.ended:
            return
        request.ended = True
        self._on_end(request)
        key = (request.session.engine, request.id)
        if self._requests.get(key) is request:  # its engine may have begun another one of that name
            del self._requests[key]
