"""What the core asks of its surroundings: of the engine's requests and blocks, and of whoever talks to the server.

Everything is called on the thread that calls the core, may not block, and may not raise for what a server does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, NewType, Protocol

from .groups import CacheGroup

__all__ = ["BlockPool", "EngineRequest", "FreeBlock", "LookupId", "Server"]

LookupId = NewType("LookupId", int)


class EngineRequest(Protocol):
    """One request, from its arrival to its end; its answers are as of now. None of it changes what the core is told by events."""

    @property
    def request_id(self) -> str:
        """The engine's name of it, as in the events; unique among the requests that have not ended."""
        ...

    @property
    def server_name(self) -> str:
        """How the server knows it: not always the same, since an engine may take longer ids than the server does."""
        ...

    @property
    def total_tokens(self) -> int:
        """Tokens that are known by now: the prompt and what was generated."""
        ...

    @property
    def may_load(self) -> bool:
        """Whether the request may use what the store has; asked each time it is matched."""
        ...

    @property
    def may_save(self) -> bool:
        """Whether its blocks may be stored."""
        ...

    @property
    def whole(self) -> bool:
        """Whether some tier asks for every block of the request, those that were loaded included (B1.1)."""
        ...

    def final_blocks(self, group: CacheGroup) -> int:
        """How many of its blocks of ``group`` have a key: those whose tokens are final, so no draft that may be rejected (B4.6)."""
        ...

    def key(self, group: CacheGroup, position: int) -> bytes:
        """The name under which the store has, or is to have, a block; ``position`` is below ``final_blocks(group)``."""
        ...


class FreeBlock(NamedTuple):
    """A block that nobody uses. ``key`` is None when its content has no name, or none that may be stored."""

    block_id: int
    group_index: int
    key: bytes | None


class BlockPool(Protocol):
    """The engine's blocks and the references on them. A block without any may be overwritten at once."""

    @property
    def num_blocks(self) -> int:
        """How many there are."""
        ...

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Take that reference from each; those that are then free are evicted in this order, after all others that hold content."""

    def put_back(self, block_ids: Sequence[int], behind: Collection[int]) -> None:
        """Take that reference from each; those that are then free are evicted in this order, before all others with content.

        But not before the blocks of ``behind``, as far as these are in a row at the eviction end.
        """

    def references(self, block_id: int) -> int:
        """How many references there are on a block."""
        ...

    def known_as(self, block_id: int) -> bytes | None:
        """The key under which the engine itself would find the block by the end of this step; None where it would not."""
        ...

    def free_block(self, block_id: int) -> FreeBlock | None:
        """The block if nobody uses it."""
        ...

    def free_blocks(self) -> Iterator[FreeBlock]:
        """The free blocks in the order of eviction."""
        ...


class Server(Protocol):
    """Carries out what the core wants of the server; it answers later, with events."""

    def start_lookup(self, lookup: LookupId, request: EngineRequest, start: int, limit: int) -> bool:
        """Find out what the store has of [``start``, ``limit``) tokens, and keep what it has from eviction (B4.3).

        Answered by ``OffloadCore.lookup_ended``. False when there is nobody to ask: a miss at once, and no answer.
        """
        ...

    def drop_lookup(self, lookup: LookupId) -> None:
        """Nobody will load what was, or will be, found: let it be evicted. No answer is expected any more."""

    def give_up_lookup(self, lookup: LookupId) -> None:
        """As drop_lookup, because it took longer than a request may wait."""

    def end_request(self, request: EngineRequest) -> None:
        """The request has ended and nothing more of it will be stored (B3.12). Called once for each that arrived."""

    def empty(self) -> None:
        """Empty the primary tier, now that no transfer is in flight. The last of these is answered by ``OffloadCore.emptied``."""
