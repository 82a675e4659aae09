"""A seeded world around the core: clients that crash, tiers that fail, clocks that jump."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.commands import Command, ContinueWork, HoldChanged, LeaseSettled, RequestsSettled, RoomOffered
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import CPU_TIER
from kvtier.tiers.core.slot_records import SlotRecords
from kvtier.tiers.errors import CoreError
from kvtier.tiers.negotiation import DEFAULT_RULES, Rule
from kvtier.tiers.secondary_tier import OffloadPolicy
from kvtier.tiers.types import EngineSession, NamespaceSpec

from . import inspect as inside
from .calls import Calls
from .conversations import Conversations
from .environment import Environment
from .event_readers import EventReaders
from .handoffs import Handoffs
from .hold_calls import Publication
from .ledger import Ledger, RoomBook
from .model import CHAINS, EXERCISED, EXTENT, SPECS, Invariant, ModelTier, Name, Violation, is_hold_only, label
from .readers import Readers
from .requests import RequestRecord, TierView
from .sessions import Sessions
from .tier_settings import TierSettingsModel, random_settings
from .work import Work, spell
from .writers import Writers

__all__ = ["TICKS", "World"]

RULES = (DEFAULT_RULES, DEFAULT_RULES, (), (Rule(OffloadPolicy.REQUEST_LEVEL, "always"),))

CONTINUED = 0.6
"""Part of the events that continue a call, while there is one that need not wait."""

TICKS = ("tick", "outlast_pins", "stop_clock", "jump_forward", "jump_back")
"""Events in which the core learns the time."""

MAX_WORK = 5000
"""Steps until all work must have ended, if no client asks for more."""


class World:
    """Clients, tiers and time around one core; every choice comes from the seed."""

    def __init__(self, seed: int, only: Invariant | None = None) -> None:
        """With `only` the other invariants are not checked, so that a mutant must fail this one."""
        self.rng = random.Random(seed)
        self.only = only
        self._seed = seed
        self._pools = random.Random(f"pools of {seed}")
        self.coverage = Counter(dict.fromkeys(EXERCISED, 0))
        self.now = self.rng.choice((1e6, 1e9))
        self.memory: dict[int, str] = {}
        self.lost: set[tuple[str, Name]] = set()
        """Blocks that tiers have lost without the core's knowledge."""
        self.tiers = [ModelTier("near", 40 * 4096), ModelTier("far", 80 * 4096)][: self.rng.choice((0, 1, 1, 2, 2, 2))]
        for tier in self.tiers:
            tier.rules = self.rng.choice(RULES)
            if self.rng.random() < 0.3:
                tier.share(gather_bytes=self.rng.choice((0, 10 * 4096)))
            if self.rng.random() < 0.5:
                self._fill(tier)
        self.sessions = Sessions(self)
        self.environment = Environment(self)
        weighted: dict[Callable[[], None], float] = {}
        self.calls = Calls(self)
        for actors in (
            self.sessions,
            self.calls,
            Writers(self),
            Readers(self),
            Handoffs(self),
            Conversations(self),
            self.environment,
        ):
            weighted |= actors.actions()
        self._actions = list(weighted)
        self._weights = list(accumulate(weighted.values()))
        self.steps = 0
        self.doing = "start"
        self.digest = hashlib.blake2b(digest_size=8)

    def _fill(self, tier: ModelTier) -> None:
        """Gives a tier blocks of an earlier run."""
        for spec in SPECS:
            for group, nbytes in enumerate(spec.part_bytes):
                for key in self.rng.choice(CHAINS[group])[: self.rng.randint(1, 10)]:
                    tier.put(spec, key, nbytes)

    def start_core(self) -> None:
        """Starts a server: memory is empty, and tiers keep their blocks."""
        self.calls.open.clear()  # the end of an operation can end a request in the earlier core
        self.region_bytes = self.rng.choice((2, 3, 5, 8)) * EXTENT
        self.backed_bytes = 0
        for tier in self.tiers:
            tier.begun.clear()
            tier.finished.clear()
            tier.capacity_bytes = self.rng.choice((20, 40, 80)) * 4096
        capacities = {CPU_TIER: self.region_bytes, **{tier.name: tier.capacity_bytes for tier in self.tiers}}
        self.settings_model = TierSettingsModel(random_settings(self.rng, capacities, self._pools))
        for policy in self.settings_model.settings.eviction.values():
            self.saw(f"policy {policy}")
        self.recorded = bytearray(SlotRecords.size_bytes(self.region_bytes, EXTENT))
        records = SlotRecords(memoryview(self.recorded), self.region_bytes, EXTENT)
        records.format()
        self.core = TierManager(
            self.region_bytes,
            EXTENT,
            self.tiers,
            max_queued_bytes=self.rng.choice((2, 8, 32)) * 4096,
            settings=self.settings_model.settings,
            now=self.now,
            records=records,
        )
        self.event_readers = EventReaders(self.core, self._seed)
        self.before = self.core_view = inside.CoreView(self.core)
        self.memory.clear()
        self.lost.clear()
        self.ledger = Ledger(len(self.tiers))
        self.rooms = RoomBook()
        self.ledger.stored.update(*self.core_view.held)
        self.work = Work(self)
        self.work_left = False
        """Whether the core has asked for the next slice."""
        self.settled: set[int] = set()
        self.waiting_leases: set[int] = set()
        """Leases, open or closed, that wait for blocks."""
        self.overdue: set[Block] = set()
        """Blocks in retiring extents whose pins the core may have ended in this event."""
        self.deleted: set[Name] = set()
        """Blocks that a client has deleted in this event."""
        self.damaged: set[Block] = set()
        """Blocks that were found damaged. Those with pins are dropped later."""
        self.wrong: set[Block] = set()
        """Those whose bytes are wrong. A tier that is storing one removes it after the store."""
        self.changed: set[tuple[bytes, str, str]] = set()
        self._evictions = [0] * (len(self.tiers) + 1)
        self._due: list[tuple[RequestRecord, list[Name]]] = []
        self.environment.hanging.clear()
        self.environment.stalled.clear()
        self.environment.latest = self.now
        self.environment.back(self.rng.choice((1, 2, 8)))
        for _ in range(3):
            self.sessions.open_session()
        self.take_commands()

    def step(self) -> None:
        if self.calls.ready and self.rng.random() < CONTINUED:
            self._event(self.calls.continue_call)
            return
        self._event(self.rng.choices(self._actions, cum_weights=self._weights)[0])

    def _event(self, action: Callable[[], None]) -> None:
        self.steps += 1
        self.doing = action.__name__
        self._begin_event()
        action()
        self.take_commands()
        self._end_event()
        self.digest.update(f"{self.doing} {self.now} {self.core_view.stats.lookup_misses}".encode())

    def _begin_event(self) -> None:
        self.settled.clear()
        self.deleted = set()
        self.changed.clear()
        self.ledger.holds.ended.clear()
        self._due.clear()
        self.settings_model.begin_event()
        self.before = self.core_view

    def _end_event(self) -> None:
        """Updates the model of requests, and counts the events of this step."""
        core_view = self.core_view = inside.CoreView(self.core)
        self._end_overdue()
        self.saw("blocks settled in slices", bool(core_view.unsettled))
        self.ledger.requests.finish_of_ended_sessions()
        self.ledger.end_of_stores({store.id for store in inside.abandoned(self.core)})
        self.ledger.holds.update_engines({client.session.engine for client in self.ledger.clients})
        left = (block for block in self.before.ready if not block.ready and not block.hold_only)
        earlier = self.damaged if self.doing != "find_damage" else ()
        self.gone = [block for block in left if block not in earlier]
        self.gone_below = [old - new for old, new in zip(self.before.held, core_view.held, strict=True)]
        secondaries = inside.secondaries(self.core)
        view = TierView(
            self.before.held, core_view.held, lambda tier, name: inside.is_storing(secondaries[tier - 1], name)
        )
        for record, names in self._due:
            self.ledger.requests.due(record, names, view)
        self.ledger.count_arrivals()
        gathering = any(each.write_back_queue and not each.stores for each in secondaries)
        self.saw("blocks gathered", gathering)
        self.saw("requests cut short", any(record.missing for record in self.ledger.requests.just_ended))
        self.saw(
            "parked blocks resolved", bool(self.ledger.requests.resolve_parked(view, inside.late_requests(self.core)))
        )
        fresh = set(core_view.ready).difference(self.before.ready)
        self.ledger.stored.update(block.name for block in fresh)
        for number, tier in enumerate(core_view.stats.tiers):
            self.saw(f"evictions {tier.name}", tier.evictions > self._evictions[number])
            self.saw("uses declined", tier.declined > 0)
            self._evictions[number] = tier.evictions

    def _end_overdue(self) -> None:
        """Ends the leases and stores that the core has ended, because they pinned old extents."""
        since, latest = self.before.retirements, self.environment.latest
        late = {number for number in self.before.retiring if latest - since[number] >= inside.GRACE_SECONDS}
        ends = self.doing in (*TICKS, "next_slice")
        self.overdue = {block for block, extents in self.before.extents.items() if ends and extents & late}
        leases, stores = inside.leases(self.core), inside.stores(self.core)
        for number, lease in list(self.ledger.leases.items()):
            if number not in leases and not self.overdue.isdisjoint(lease.lease.items):
                del self.ledger.leases[number]
                self.saw("leases ended in retiring extents")
        for store in self.ledger.open_stores():
            if store.id not in stores and not self.overdue.isdisjoint(store.blocks):
                self.ledger.abandon(store)
                self.saw("stores ended in retiring extents")

    def retired_with(self, blocks: Iterable[Block]) -> list[Block]:
        """Returns those of these blocks that had a slot in a retiring extent."""
        retiring = self.before.retiring.keys() | (self.core_view.retirements.keys() - self.before.retirements.keys())
        return [block for block in blocks if not retiring.isdisjoint(self.before.extents.get(block, ()))]

    def insisted_on(
        self, record: RequestRecord, keys: Iterable[bytes], granted: Collection[Name], session: EngineSession
    ) -> None:
        """Records keys of a request: ready blocks cascade, running stores are awaited."""
        ready = []
        for key in keys:
            if is_hold_only(key):  # tiers do not get it
                continue
            block = inside.block(self.core, session.namespace.id, key)
            if block is not None and block.ready:
                ready.append(block.name)
            elif block is not None and block.pending and block.name not in granted:
                record.parked[block] = None
                self.saw("blocks parked")
        self._due.append((record, ready))

    def is_due(self, record: RequestRecord, names: list[Name]) -> None:
        """Records a completed store: its ready blocks cascade to the request-level tiers."""
        if record.request_level_tiers:
            self._due.append((record, [name for name in names if not is_hold_only(name[1])]))

    def must(self, invariant: Invariant, condition: bool, text: str) -> None:  # noqa: FBT001 - a predicate
        """Raises `Violation` unless a condition holds."""
        if not condition and self.only in (None, invariant):
            raise Violation(invariant, text)

    def saw(self, what: str, condition: bool = True, *, times: int = 1) -> None:  # noqa: FBT001, FBT002 - a predicate
        """Counts an event, if the condition holds."""
        if condition:
            self.coverage[what] = self.coverage.pop(what) + times

    def publishing(self) -> list[Block]:
        """Returns the blocks that publications have pinned and no hold owns, once per pin."""
        calls = (call for call in self.calls.open if isinstance(call, Publication))
        return [block for call in calls for block in call.pinned]

    def refused(self, error: type[CoreError], event: Callable[[], object]) -> None:
        """Checks that an event is refused for this reason, and changes nothing."""
        before, commands = self.core.stats(), list(self.take_commands())
        try:
            event()
        except CoreError as refusal:
            self.must(Invariant.REFUSALS, type(refusal) is error, f"{refusal!r} instead of {error.__name__}")
        else:
            self.must(Invariant.REFUSALS, False, f"not refused with {error.__name__}")
        # Except the count of claims that find no hold.
        after = replace(self.core.stats(), claims_missed=before.claims_missed)
        self.must(Invariant.REFUSALS, after == before, "figures have changed")
        self.must(Invariant.REFUSALS, not self.take_commands(), f"commands were given, after {commands}")

    def take_commands(self) -> list[Command]:
        """Processes the commands of the core."""
        commands = self.core.take_commands()
        for command in commands:
            self.digest.update(spell(command).encode())
            if isinstance(command, LeaseSettled):
                self.settled.add(command.lease_id)
            elif isinstance(command, HoldChanged):
                self.changed.add(command.name)
            elif isinstance(command, RoomOffered):
                self.rooms.told.add(command.waiter)
            elif isinstance(command, ContinueWork):
                self.must(Invariant.JOBS, not self.work_left, "the next slice was requested twice")
                self.work_left = True
            elif not isinstance(command, RequestsSettled):
                self.work.take(command)
        return commands

    def settle(self) -> Iterator[None]:
        """All clients leave and all work ends, including that of hanging tiers.

        Yields after every step.
        """
        while self.ledger.clients:
            self._event(self.sessions.close_session)
            yield
        while self.calls.open:
            self._event(self.calls.continue_call)
            yield
        while self.ledger.orphans:
            self._event(self.sessions.hang_up)
            yield
        while self.ledger.holds.open:
            self._event(self.environment.jump_forward)
            yield
        self._event(self.environment.recover_all)
        yield
        left = MAX_WORK
        while self.work_left or not self.work.done() or inside.is_gathering(self.core):
            while self.work_left:
                self._event(self.environment.next_slice)
                yield
            for action in (self.environment.run_work, self.environment.answer, self.environment.tick):
                self._event(action)
                yield
            left -= 1
            self.must(Invariant.LEAKS, left > 0, "work never ends")

    def holds_whole(self, tier: ModelTier, spec: NamespaceSpec, key: bytes) -> bool:
        """Returns whether a tier has a block with the right bytes, or has lost it itself."""
        name = (spec.id, key)
        if (tier.name, name) in self.lost or name in tier.lies:
            return True
        wanted = tuple(label(spec.id, key, rank) for rank in range(spec.world_size))
        return name in tier.blocks and tier.blocks[name][1] == wanted
