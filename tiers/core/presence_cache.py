"""Presence cache: answers of a shared tier to the question whether it has a block."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ..secondary_tier import NamespaceId
from ..types import tenant_of

__all__ = ["Name", "Presence", "PresenceCache"]

Name = tuple[NamespaceId, bytes]
T = TypeVar("T")

VALID_SECONDS = 10.0
"""How long a positive answer is used. If the store drops the block during this time, a load reports
the block as missing. A negative answer is used until the next tick, which is at most a second, so
that blocks of other servers are found soon."""

LACKED_TICKS = 10
"""A tier that lacked a block this number of ticks ago does not delay the hit of a later tier."""
LATE_TICKS = 2
"""A query that has no answer after this number of ticks, one to two seconds, does not either."""
MAX_ANSWERS = 1 << 16
"""Limit of the cached positive answers of all tenants, and of the negative ones."""
DROPPED_PER_TICK, DROPPED_PER_ANSWER = 1024, 2
"""Limit of the old answers that a tick drops, about 0.5 ms, and that a new answer drops. No call
uses those that remain."""


class Presence(enum.Enum):
    """Whether a tier, or any of several tiers, can load a block."""

    HELD = enum.auto()
    ABSENT = enum.auto()
    EXCLUDED = enum.auto()
    """The block is present, but the lookup excludes the tier."""
    UNKNOWN = enum.auto()
    """The core must first ask the shared tier whether it has the block."""
    STALLED = enum.auto()
    """The block is present but cannot be loaded now: the tier is stalled, or still runs an earlier
    load of the block that was given up."""


class _Answers(Generic[T]):
    """Answers by the name of their block, oldest first.

    Beyond `MAX_ANSWERS` it drops the oldest answer of the tenant with most, so that the lookups of
    one tenant drop no answers for others. The order is an `OrderedDict`, because a plain dict finds
    its oldest entry behind the places of all removed ones.
    """

    def __init__(self, is_old: Callable[[T], bool]) -> None:
        self._is_old = is_old
        self._of_tenant: OrderedDict[bytes, OrderedDict[Name, T]] = OrderedDict()
        self._count = 0
        self._largest: OrderedDict[Name, T] = OrderedDict()

    def get(self, name: Name) -> T | None:
        """Returns the answer, unless it is old."""
        own = self._of_tenant.get(tenant_of(name[0]))
        answer = None if own is None else own.get(name)
        return None if answer is None or self._is_old(answer) else answer

    def set(self, name: Name, answer: T) -> None:
        self._drop_old(DROPPED_PER_ANSWER)
        tenant = tenant_of(name[0])
        own = self._of_tenant.get(tenant)
        if own is None:
            own = self._of_tenant[tenant] = OrderedDict()
        self._count += own.pop(name, None) is None
        own[name] = answer
        if len(own) > len(self._largest):
            self._largest = own
        if self._count > MAX_ANSWERS:
            self._largest.popitem(last=False)
            self._count -= 1

    def forget(self, name: Name) -> None:
        own = self._of_tenant.get(tenant_of(name[0]))
        if own is not None and own.pop(name, None) is not None:
            self._count -= 1

    def tick(self) -> None:
        self._drop_old(DROPPED_PER_TICK)
        self._largest = max(self._of_tenant.values(), key=len, default=OrderedDict())

    def _drop_old(self, most: int) -> None:
        """Drops at most this number of old answers. The tenants take turns."""
        for _ in range(min(most, len(self._of_tenant))):
            if not most:
                break
            tenant, own = next(iter(self._of_tenant.items()))
            while own and most and self._is_old(next(iter(own.values()))):
                own.popitem(last=False)
                self._count -= 1
                most -= 1
            if own:
                self._of_tenant.move_to_end(tenant)
            else:
                del self._of_tenant[tenant]


class PresenceCache:
    """Answers of one shared tier to the question whether it has a block, kept for a short time."""

    def __init__(self) -> None:
        self._present = _Answers[float](lambda said_at: self._now - said_at >= VALID_SECONDS)
        """Time of the answer for each block that the tier has."""
        self._absent = _Answers[int](lambda tick: self._ticks - tick >= LACKED_TICKS)
        """Tick of the answer for each block that the tier lacked."""
        self._asked: dict[Name, int] = {}
        """Tick of each query without an answer."""
        self._to_ask: list[Name] = []
        self._ticks = 0
        self._now = float("-inf")

    def get(self, name: Name) -> bool | None:
        """Returns the cached answer. Without an answer, queues a query and returns None."""
        if name in self:
            return True
        if self._absent.get(name) == self._ticks:
            return False
        if name not in self._asked:
            self._asked[name] = self._ticks
            self._to_ask.append(name)
        return None

    def must_wait(self, name: Name) -> bool:
        """Returns whether the answer to a query may change which tier a block comes from.

        It may not if the tier lacked the block a short time ago, or is late with the answer.
        """
        asked = self._asked.get(name)
        return self._absent.get(name) is None and asked is not None and self._ticks - asked < LATE_TICKS

    def __contains__(self, name: Name) -> bool:
        """Returns whether the last answer is that the tier has the block. Queues no query."""
        return self._present.get(name) is not None

    def is_asked(self, name: Name) -> bool:
        """Returns whether a query has no answer yet."""
        return name in self._asked

    def take_queries(self) -> list[Name]:
        new, self._to_ask = self._to_ask, []
        return new

    def record_answers(self, names: Sequence[Name], answers: Sequence[bool], now: float) -> None:
        """Records answers in the order of the names. A missing answer counts as absent."""
        for number, name in enumerate(names):
            self._asked.pop(name, None)
            self.set(name, there=number < len(answers) and answers[number] is True, now=now)

    def set(self, name: Name, *, there: bool, now: float) -> None:
        self.forget(name)
        if there:
            self._present.set(name, now)
        else:
            self._absent.set(name, self._ticks)

    def forget(self, name: Name) -> None:
        self._present.forget(name)
        self._absent.forget(name)

    def tick(self, now: float) -> None:
        """Advances the time. A call with the time of the last one is not a tick."""
        if now <= self._now:
            return
        self._ticks += 1
        self._now = now
        self._absent.tick()
        self._present.tick()
