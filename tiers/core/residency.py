"""Residency index: which secondary tier holds a block.

The answer comes from the catalogs, and for shared tiers also from queries to the tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from ..errors import InvalidItem
from ..secondary_tier import NamespaceId, TierFilter
from ..types import EngineSession, JobId
from .commands import Change, Command, LookupInTier
from .cpu_tier import CpuTier
from .operations import Operation
from .presence_cache import Name, Presence
from .secondary_state import SecondaryTierState

__all__ = ["ResidencyIndex", "SharedTierQueries"]

QUERY_SLICE = 512
"""Keys of a query: 2 to 3 ms to record the answers."""
_FEW_KEYS = 16

_ALL_TIERS = TierFilter()


class ResidencyIndex:
    def __init__(
        self, secondaries: Sequence[SecondaryTierState], *, new_id: Callable[[], JobId], commands: list[Command]
    ) -> None:
        """`new_id` creates ids for queries, from the same sequence as job ids."""
        self.has_shared_tiers = any(secondary.tier.shared for secondary in secondaries)
        self._secondaries = secondaries
        self._new_id = new_id
        self._commands = commands
        self._queries: dict[JobId, tuple[SecondaryTierState, Sequence[Name]]] = {}

    def excluded(self, tiers: TierFilter) -> frozenset[int]:
        """Returns the positions of the tiers that a filter names. Raises InvalidItem."""
        if not tiers:
            return frozenset()
        unknown = set(tiers.names) - {secondary.tier.name for secondary in self._secondaries}
        if unknown:
            names = ", ".join(secondary.tier.name for secondary in self._secondaries) or "none"
            raise InvalidItem(f"cannot exclude tier {min(unknown)!r}: unknown tier; the secondary tiers are: {names}")
        return frozenset(secondary.index for secondary in self._secondaries if secondary.matches(tiers))

    def find(
        self,
        namespace: NamespaceId,
        key: bytes,
        excluded: Collection[int] = (),
        *,
        counted: bool = True,
        waits: bool = True,
    ) -> tuple[SecondaryTierState | None, Presence]:
        """Returns the first tier that can load a block, or None and why no tier can.

        If an earlier tier must still answer (`PresenceCache.must_wait`), the result is UNKNOWN,
        although a later tier has the block: the earlier one is faster. With `waits` False, it is
        the first tier that is known to have the block. If `counted`, counts a miss in each earlier
        tier that could not load the block.
        """
        presence, must_wait = Presence.ABSENT, False
        for secondary in self._secondaries:
            found = secondary.presence(namespace, key, excluded)
            if found is Presence.HELD and not must_wait:
                return secondary, found
            if found is Presence.UNKNOWN and waits:
                must_wait |= secondary.presence_cache.must_wait((namespace, key))
            if found in (Presence.ABSENT, Presence.STALLED):
                secondary.misses += counted and secondary.index not in excluded and not secondary.tier.on_demand
            if found is not Presence.ABSENT and presence is not Presence.UNKNOWN:
                presence = found
        return None, presence

    def keys_among(self, namespace: NamespaceId, keys: Sequence[bytes]) -> set[bytes]:
        """Returns those of the keys for which `find` may return a tier, or a reason."""
        if self.has_shared_tiers:
            return set(keys)
        return set().union(*(secondary.keys_among(namespace, keys) for secondary in self._secondaries))

    def count_misses(self, count: int, excluded: Collection[int]) -> None:
        """Counts misses of keys that `keys_among` does not return, as `find` would."""
        for secondary in self._secondaries:
            secondary.misses += count * (secondary.index not in excluded and not secondary.tier.on_demand)

    def peek(self, namespace: NamespaceId, key: bytes, excluded: Collection[int] = ()) -> Presence:
        """Returns the presence that `find` would return; does not count misses."""
        return self.find(namespace, key, excluded, counted=False)[1]

    def position_of(self, namespace: NamespaceId, key: bytes) -> int | None:
        return next(
            (secondary.index for secondary in self._secondaries if secondary.catalog.held(namespace, key) is not None),
            None,
        )

    def is_durable(self, namespace: NamespaceId, key: bytes) -> bool:
        """Returns whether a tier that survives restarts holds this block."""
        return any(secondary.tier.durable and secondary.catalog.held(namespace, key) for secondary in self._secondaries)

    def is_becoming_durable(self, namespace: NamespaceId, key: bytes) -> bool:
        """Returns whether a tier that survives restarts holds this block or is storing it."""
        return any(secondary.tier.durable and secondary.catalog.get(namespace, key) for secondary in self._secondaries)

    def is_asked(self, namespace: NamespaceId, key: bytes, excluded: Collection[int]) -> bool:
        """Returns whether a shared tier, for which a query waits, has not answered yet."""
        return any(
            secondary.presence_cache.is_asked((namespace, key))
            for secondary in self._secondaries
            if secondary.index not in excluded and not secondary.stalled
        )

    def send_queries(self) -> None:
        """Sends the queries that `find` has queued to the shared tiers."""
        if not self.has_shared_tiers:
            return
        for secondary in self._secondaries:
            queued = secondary.presence_cache.take_queries()
            for start in range(0, len(queued), QUERY_SLICE):
                job_id, names = self._new_id(), queued[start : start + QUERY_SLICE]
                self._queries[job_id] = (secondary, names)
                self._commands.append(LookupInTier(job_id, secondary.index, names))

    def locate(self, tier: int, names: Iterable[Name], now: float) -> None:
        for name in names:
            self._secondaries[tier - 1].presence_cache.set(name, there=True, now=now)

    def forget(self, tier: int, names: Iterable[Name]) -> None:
        for name in names:
            self._secondaries[tier - 1].presence_cache.forget(name)

    def record_answers(self, job_id: JobId, answers: Sequence[bool], now: float) -> None:
        secondary, names = self._queries.pop(job_id, (None, ()))
        if secondary is not None:
            secondary.record_answers(names, answers, now)


class SharedTierQueries:
    """Queries to shared tiers before a lookup: does a tier have a block? (B3.17)."""

    def __init__(self, residency: ResidencyIndex, cpu_tier: CpuTier) -> None:
        self._residency = residency
        self._cpu_tier = cpu_tier

    def query(
        self,
        session: EngineSession,
        keys: Sequence[bytes],
        tiers: TierFilter = _ALL_TIERS,
        *,
        prefix: bool,
        deadline: float,
        now: float,
        slice_keys: int = QUERY_SLICE,
    ) -> Operation[None]:
        """Queries the tiers that may have the blocks; waits for the answers or the deadline.

        With `prefix` the operation ends at the first miss.
        """
        if not self._residency.has_shared_tiers:
            return
        outstanding: deque[bytes] = deque()
        for start in range(0, len(keys), slice_keys):
            if len(keys) > slice_keys:
                now = yield None
            if self._ask(session, keys[start : start + slice_keys], tiers, outstanding, prefix=prefix):
                break
        while outstanding and now < deadline:
            now = yield from self._drop_answered(session, outstanding, tiers, slice_keys, now, prefix=prefix)
            self._residency.send_queries()
            if outstanding:
                now = yield Change(deadline)
                if len(outstanding) > _FEW_KEYS:  # a change wakes all calls, which then take turns
                    now = yield None

    def _ask(
        self,
        session: EngineSession,
        keys: Sequence[bytes],
        tiers: TierFilter,
        outstanding: deque[bytes],
        *,
        prefix: bool,
    ) -> bool:
        """Adds the keys whose answers are outstanding. Returns whether a miss ends the scan."""
        is_over = False
        for key in keys:
            presence = self.presence(session, key, tiers)
            if presence is Presence.UNKNOWN:
                outstanding.append(key)
            elif prefix and presence is not Presence.HELD:
                is_over = True
                break
        self._residency.send_queries()
        return is_over

    def _drop_answered(
        self,
        session: EngineSession,
        outstanding: deque[bytes],
        tiers: TierFilter,
        slice_keys: int,
        now: float,
        *,
        prefix: bool,
    ) -> Operation[float]:
        """Drops the first keys, up to a key without an answer. With `prefix`, a miss drops all.

        If the answers for this key have expired, asks again for a slice of keys, because their
        answers came before.
        """
        namespace, excluded = session.namespace.id, self._residency.excluded(tiers)
        for number in range(1, len(outstanding) + 1):
            was_asked = self._residency.is_asked(namespace, outstanding[0], excluded)
            presence = self.presence(session, outstanding[0], tiers)
            if presence is Presence.UNKNOWN:
                if not was_asked:
                    for key in islice(outstanding, 1, slice_keys):
                        self.presence(session, key, tiers)
                break
            outstanding.popleft()
            if prefix and presence is not Presence.HELD:
                outstanding.clear()
                break
            if not number % slice_keys:
                self._residency.send_queries()
                now = yield None
        return now

    def presence(self, session: EngineSession, key: bytes, tiers: TierFilter = _ALL_TIERS) -> Presence:
        """Returns whether any tier has a block. Queues a query if a tier has not answered."""
        namespace = session.namespace.id
        block = self._cpu_tier.blocks_of(namespace).get(key)
        if block is not None and (block.ready or block.pending):
            return Presence.HELD
        return self._residency.peek(namespace, key, self._residency.excluded(tiers))

    def lacking(self, session: EngineSession, keys: Sequence[bytes], tiers: TierFilter) -> list[bytes]:
        """Returns the keys that no tier has, as far as the tiers have answered. Asks the others."""
        lacking = [key for key in keys if self.presence(session, key, tiers) is not Presence.HELD]
        self._residency.send_queries()
        return lacking

    def locate(self, tier: int, session: EngineSession, keys: Iterable[bytes], now: float) -> None:
        """Records blocks that an `on_demand` tier can load.

        The core forgets each when its load has ended, and at the latest after ten seconds.
        """
        self._residency.locate(tier, [(session.namespace.id, key) for key in keys], now)

    def withdraw(self, tier: int, session: EngineSession, keys: Iterable[bytes]) -> list[bytes]:
        """Forgets those of the located blocks that are not being loaded; returns their keys."""
        blocks = self._cpu_tier.blocks_of(session.namespace.id)
        unused = [key for key in keys if (block := blocks.get(key)) is None or not block.promoting]
        self._residency.forget(tier, [(session.namespace.id, key) for key in unused])
        return unused
