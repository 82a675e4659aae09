"""Eviction queues: the items of a tier in eviction order, per tenant share and size class.

Each queue has a separate eviction policy. So the search for a victim examines only items of shares
that must free memory. Retained items are in no queue until their retention ends. Items that a hold
protects are in no queue until the hold ends.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from ..secondary_tier import NamespaceId
from ..types import ShareStats
from .policy import EvictionPolicy, Item
from .quotas import Quotas, TenantShare

__all__ = ["EvictionQueue", "EvictionQueues", "ExpiryWheel", "QueueItem", "by_queue"]

H = TypeVar("H", bound=Hashable)


class ExpiryWheel(Generic[H]):
    """Timing wheel: items grouped by expiry time, rounded up to a multiple of `width` seconds."""

    def __init__(self, width: float = 1.0) -> None:
        self._width = width
        self._slot_of: dict[H, int] = {}
        self._slots: dict[int, dict[H, None]] = {}
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._slot_of)

    def put(self, items: Iterable[H], when: float) -> None:
        """Sets the expiry time. Items with equal rounded times expire in insertion order."""
        number = math.ceil(when / self._width)
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = {}
            heapq.heappush(self._order, number)
        for item in items:
            known = self._slot_of.get(item)
            if known == number:
                continue
            if known is not None:
                del self._slots[known][item]
            self._slot_of[item] = number
            slot[item] = None

    def when(self, item: H) -> float:
        return self._slot_of[item] * self._width

    def discard(self, item: H) -> None:
        """Removes an item; ignores unknown items."""
        number = self._slot_of.pop(item, None)
        if number is not None:
            del self._slots[number][item]

    def has_due(self, now: float) -> bool:
        return bool(self._order) and self._order[0] * self._width <= now

    def take(self, now: float, most: int) -> list[H]:
        """Removes and returns up to `most` expired items, earliest first."""
        taken: list[H] = []
        while len(taken) < most and self.has_due(now):
            slot = self._slots[self._order[0]]
            due = list(islice(slot, most - len(taken)))
            for item in due:
                del slot[item], self._slot_of[item]
            taken += due
            if not slot:
                del self._slots[heapq.heappop(self._order)]
        return taken


MAX_AT_ONCE = 1024
"""How many expired items are handled at once, so that the event loop is not delayed."""

_SLOTS_OF_TTL = 1024

KEPT_QUEUES = 64
"""Number of queues up to which empty ones stay, with what their policies have learned."""

MAX_REQUESTS = 16_384
"""Limit of requests with known queues, about 300 bytes each. Beyond it, the oldest one counts as
finished. The policies keep at most 1,024 requests each."""


class QueueItem(Item, Protocol):
    """An item of an eviction queue. Compared by identity."""

    queue: EvictionQueue[Any]
    retained: bool

    @property
    def busy(self) -> bool:
        """Whether a store or load of the item is running, so that it cannot be evicted.

        If the item is not retained, its bytes count in `share.busy`. Always False in the CPU tier.
        """
        ...

    @property
    def allocated_bytes(self) -> int:
        """The bytes that the item occupies in the tier when it is complete."""
        ...


L = TypeVar("L", bound=QueueItem)

queue_of = attrgetter("queue")


class EvictionQueue(Generic[L]):
    """The items of one share in one size class, and the policy that orders them."""

    __slots__ = ("demoted", "policy", "share", "size_class", "victim_buffer")

    def __init__(self, share: TenantShare, size_class: int, policy: EvictionPolicy[L]) -> None:
        self.share = share
        self.size_class = size_class
        self.policy = policy
        self.victim_buffer: deque[L] = deque()
        """Next victims, valid until the next use of an item of this queue. Without the buffer,
        every search would walk over the same unevictable items again."""
        self.demoted: dict[L, None] = {}
        """Items that are evicted before those of the policy, which does not order them."""

    def victims(self) -> Iterator[L]:
        """Yields every item in eviction order."""
        return chain(self.demoted, self.policy.victims()) if self.demoted else self.policy.victims()

    def oldest(self) -> L | None:
        """Returns a demoted item, or an item with the earliest last use; None if there are none."""
        return next(iter(self.demoted)) if self.demoted else self.policy.oldest()

    @property
    def is_empty(self) -> bool:
        return not self.demoted and not len(self.policy)

    def leave(self, item: L) -> None:
        """Removes an item from the eviction order; ignores unknown items."""
        if self.demoted and item in self.demoted:
            del self.demoted[item]
        else:
            self.policy.remove(item)


def by_queue(items: Sequence[L]) -> Iterable[tuple[EvictionQueue[L], Sequence[L]]]:
    queues = set(map(queue_of, items))
    if len(queues) <= 1:  # the usual case
        return ((queues.pop(), items),) if queues else ()
    groups: dict[EvictionQueue[L], list[L]] = defaultdict(list)
    for item in items:
        groups[item.queue].append(item)
    return groups.items()


class EvictionQueues(Generic[L]):
    """The eviction queues of one tier, with retention and time to live.

    An item enters its queue at its first use, and is known until the caller removes it. While it
    is retained or protected by a hold, it is in no queue.

    Clients choose the size classes. Therefore empty queues are dropped if there are many, and the
    end of a request costs only the queues that the request has used. An item may refer to a dropped
    queue. When it enters its queue again, it moves to the current queue of its share and class.
    """

    def __init__(
        self, shares: Quotas, new_policy: Callable[[], EvictionPolicy[L]], *, ttl: float | None = None, now: float = 0.0
    ) -> None:
        """`ttl`: an item expires after this many seconds without use; None: never."""
        self.shares = shares
        self.ttl = ttl
        self.now = now
        self.expired = 0
        self.not_retained = 0
        self.may_retain: Callable[[L], bool] = lambda _: True
        """Whether the tier can keep an item that is not retained yet."""
        self._new_policy = new_policy
        self._queues: dict[tuple[TenantShare, int], EvictionQueue[L]] = {}
        self._of_class: dict[int, list[EvictionQueue[L]]] = {}
        self._sweep_at = KEPT_QUEUES
        self._used_by: OrderedDict[Hashable, dict[EvictionQueue[L], None]] = OrderedDict()
        """The queues that each unfinished request has used, oldest request first."""
        self._retained = ExpiryWheel[L]()
        self._protected: set[L] = set()
        self._unused = ExpiryWheel[L](1.0 if ttl is None else max(1.0, ttl / _SLOTS_OF_TTL))

    def queue_for(self, namespace: NamespaceId, size_class: int = 0) -> EvictionQueue[L]:
        share = self.shares.of(namespace)
        queue = self._queues.get((share, size_class))
        return queue or self._register(EvictionQueue(share, size_class, self._new_policy()))

    def _register(self, queue: EvictionQueue[L]) -> EvictionQueue[L]:
        if len(self._queues) >= self._sweep_at:
            self._drop_empty()
        self._queues[queue.share, queue.size_class] = queue
        self._of_class.setdefault(queue.size_class, []).append(queue)
        return queue

    def _drop_empty(self) -> None:
        for name in [name for name, queue in self._queues.items() if queue.is_empty]:
            queue = self._queues.pop(name)
            queue.victim_buffer.clear()
            same_class = self._of_class[queue.size_class]
            same_class.remove(queue)
            if not same_class:
                del self._of_class[queue.size_class]
        self._sweep_at = 2 * len(self._queues) + KEPT_QUEUES

    def _current(self, queue: EvictionQueue[L], items: Iterable[L]) -> EvictionQueue[L]:
        """Returns the queue that items of a queue enter, and moves them if theirs was dropped."""
        current = self._queues.get((queue.share, queue.size_class)) or self._register(queue)
        if current is not queue:
            for item in items:
                item.queue = current
        return current

    def all(self) -> Collection[EvictionQueue[L]]:
        return self._queues.values()

    def of_class(self, size_class: int) -> Sequence[EvictionQueue[L]]:
        """Returns the queues of one size class, at most one per share."""
        return self._of_class.get(size_class, ())

    def use(self, items: Sequence[L], request: Hashable, retain_until: float = 0.0) -> int:
        """Records a use of distinct items, in chain order (first block of the prompt first).

        If `retain_until` is in the future, retains the items, and returns how many of them were not
        retained, for the reasons of `retain`. Otherwise returns 0.
        """
        if self.ttl is not None:
            self._unused.put(items, self.now + self.ttl)
        if retain_until > self.now:
            items = self.retain(items, retain_until)
        elif self._retained:
            items = [item for item in items if not item.retained]
        self._tell_policies(items, request)
        return len(items) if retain_until > self.now else 0

    def finish(self, request: Hashable) -> None:
        for queue in self._used_by.pop(request, ()):
            queue.policy.finish(request)

    def remove(self, item: L) -> None:
        """Removes an item; ignores unknown items."""
        if self._protected:
            self._protected.discard(item)
        if item.retained:
            self._retained.discard(item)
            self._free(item)
        else:
            item.queue.leave(item)
        if self.ttl is not None:
            self._unused.discard(item)

    def remove_all(self, items: Sequence[L]) -> None:
        """The same as `remove` for each item, but faster."""
        if self.ttl is not None or self._retained:
            for item in items:
                self.remove(item)
            return
        if self._protected:
            self._protected.difference_update(items)
        for item in items:
            item.queue.leave(item)

    def protect(self, items: Iterable[L]) -> None:
        """Removes items from their queues until `unprotect`. `items` must be in chain order."""
        fresh = [item for item in dict.fromkeys(items) if item not in self._protected]
        for item in reversed(fresh):  # policies remove a tail faster
            if not item.retained:
                item.queue.leave(item)
        self._protected.update(fresh)

    def unprotect(self, items: Iterable[L]) -> None:
        """Returns protected items, in chain order, to their queues, as if they were used now."""
        back = [item for item in dict.fromkeys(items) if item in self._protected]
        self._protected.difference_update(back)
        self._tell_policies([item for item in back if not item.retained], None)

    def tick(self, now: float) -> list[L]:
        """Returns up to `MAX_AT_ONCE` expired items, which the caller must remove or postpone."""
        self.now = now
        self.end_retention()
        if len(self._queues) > KEPT_QUEUES:
            self._drop_empty()
        return [] if self.ttl is None else self._unused.take(self.now, MAX_AT_ONCE)

    @property
    def overdue(self) -> bool:
        """Whether another `tick` is needed: items are left whose `ttl` or retention has ended."""
        return self._retained.has_due(self.now) or self._unused.has_due(self.now)

    def end_retention(self) -> bool:
        """Returns items whose retention has ended to their queues, at most `MAX_AT_ONCE`.

        Returns whether there were such items.
        """
        items = self._retained.take(self.now, MAX_AT_ONCE)
        for item in items:
            self._free(item)
        self._tell_policies(items, None)
        return bool(items)

    def postpone(self, item: L, used_at: float | None = None) -> None:
        """Restarts an item's `ttl`: from now, or from `used_at`, its last use in another tier."""
        if self.ttl is not None:
            self._unused.put([item], (self.now if used_at is None else used_at) + self.ttl)

    def stats(self) -> tuple[ShareStats, ...]:
        return tuple(
            ShareStats(share.name, share.quota, share.limit, share.used, share.retained) for share in self.shares
        )

    def _tell_policies(self, items: Sequence[L], request: Hashable) -> None:
        if self._protected:
            items = [item for item in items if item not in self._protected]
        for named, mine in by_queue(items):
            queue = self._current(named, mine)
            queue.victim_buffer.clear()
            if queue.demoted:
                for item in mine:
                    queue.demoted.pop(item, None)
            if request is not None:
                self._record_use(request, queue)
            queue.policy.use(mine, request, self.now)

    def _record_use(self, request: Hashable, queue: EvictionQueue[L]) -> None:
        used = self._used_by.get(request)
        if used is None:
            if len(self._used_by) >= MAX_REQUESTS:
                self.finish(next(iter(self._used_by)))
            used = self._used_by[request] = {}
        used[queue] = None

    def retain(self, items: Iterable[L], until: float) -> list[L]:
        """Retains items at least until `until`.

        Returns the items beyond the retention budget, and those that the tier cannot keep.
        """
        keep: list[L] = []
        rest: list[L] = []
        for item in dict.fromkeys(items):  # a repeated item is charged once
            if item.retained:
                if self._retained.when(item) < until:
                    keep.append(item)
            elif self.may_retain(item) and self._charge(item):
                keep.append(item)
            else:
                rest.append(item)
        for item in reversed(keep):  # policies remove a tail faster
            if not item.retained:
                item.queue.leave(item)
                item.retained = True
        self._retained.put(keep, until)
        self.not_retained += len(rest)
        return rest

    def shorten(self, items: Sequence[L], until: float) -> None:
        """Ends the retention of items at `until`, or now if that is past. Ignores other items."""
        items = [item for item in items if item.retained]
        if until > self.now:
            self._retained.put(items, until)
            return
        for item in items:
            self._retained.discard(item)
            self._free(item)
        self._tell_policies(items, None)

    def retained_until(self, item: L) -> float:
        """Returns the end of the retention of a retained item, in seconds."""
        return self._retained.when(item)

    def demote(self, item: L) -> bool:
        """Makes an item a next victim until its next use; False if it is retained or protected."""
        if item.retained or item in self._protected:
            return False
        item.queue.leave(item)
        queue = self._current(item.queue, [item])
        queue.victim_buffer.clear()
        queue.demoted[item] = None
        return True

    def _charge(self, item: L) -> bool:
        share, nbytes = item.queue.share, item.allocated_bytes
        if share.budget.used + nbytes > share.budget.bound:
            return False
        share.budget.used += nbytes
        share.retained += nbytes
        share.busy -= nbytes if item.busy else 0
        return True

    def _free(self, item: L) -> None:
        share, nbytes = item.queue.share, item.allocated_bytes
        share.budget.used -= nbytes
        share.retained -= nbytes
        share.busy += nbytes if item.busy else 0
        item.retained = False
