"""Topic of the publisher: the changes of its blocks that it has not published yet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from .messages import ContentOf, PublishedEvent

__all__ = ["Topic"]

_BATCH_KEYS = 256
"""Maximum number of keys of a message: 35 KB with one event per block."""


class Topic:
    """Blocks whose last published event is not the last one that happened.

    A block that changes twice before it is published is not published. So a topic needs no memory
    for what it has published, and catches up however many changes there are.
    """

    def __init__(self, block_tokens: Sequence[int], content_of: ContentOf) -> None:
        self.block_tokens = block_tokens
        """Number of tokens of a block, for each group."""
        self.content_of = content_of
        self.is_wanted = False
        """Whether a session has the topic. If not, the topic ends when all blocks are removed."""
        self._unsent: dict[tuple[str, bool], _Unsent] = {}
        """Blocks by medium, and whether they are stored or removed."""

    @property
    def has_unsent(self) -> bool:
        return any(unsent.keys for unsent in self._unsent.values())

    def change(self, event: PublishedEvent) -> None:
        unsent = self._of(event.medium, is_stored=event.is_stored).keys
        opposite = self._of(event.medium, is_stored=not event.is_stored).keys
        for key in event.keys:
            if not opposite.pop(key, False):
                unsent[key] = True

    def take(self) -> list[PublishedEvent]:
        """Returns the next event of each medium and kind; they count as published."""
        events = [
            PublishedEvent(is_stored, medium, unsent.take()) for (medium, is_stored), unsent in self._unsent.items()
        ]
        return [event for event in events if event.keys]

    def _of(self, medium: str, *, is_stored: bool) -> _Unsent:
        unsent = self._unsent.get((medium, is_stored))
        if unsent is None:
            unsent = self._unsent[medium, is_stored] = _Unsent(self.content_of)
        return unsent


class _Unsent:
    """Queue of blocks, in which each block comes after its parent.

    Indexers drop a block whose parent they do not know.
    """

    def __init__(self, content_of: ContentOf) -> None:
        self.keys: dict[bytes, bool] = {}
        self._content_of = content_of
        self._chain: list[bytes] = []
        """The next blocks, last first, unless they are no longer in `keys`."""

    def take(self) -> list[bytes]:
        taken: list[bytes] = []
        oldest = iter(list(islice(self.keys, _BATCH_KEYS)))
        while len(taken) < _BATCH_KEYS:
            if not self._chain:
                key = next(oldest, None)
                if key is None:
                    break
                self._chain = self._ancestors(key)
            elif self.keys.pop(key := self._chain.pop(), False):
                taken.append(key)
        if not self.keys:
            self.keys.clear()  # a dict keeps its memory when it becomes empty
        return taken

    def _ancestors(self, key: bytes) -> list[bytes]:
        """Returns a block, its parent, and so on, as long as they are in the queue."""
        chain: dict[bytes, None] = {}
        each: bytes | None = key
        while each is not None and each in self.keys and each not in chain:
            chain[each] = None  # also ends the loop if an engine has described a cycle
            content = self._content_of(each)
            each = content[0] if content is not None else None
        return list(chain)
