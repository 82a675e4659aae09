"""Shadow restarts: at random times another core recovers from a copy of the records.

The running core does not notice. The other core must have exactly the blocks that readers find in
the running one, must keep the slots of clients that may still write, and must work. Some copies are
damaged first. Then only the blocks with a damaged record may be lost.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import LoadFromTier, LookupInTier, StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.operations import run_to_end
from kvtier.tiers.core.recovery import RecoveredBlocks
from kvtier.tiers.core.slot_records import RecordsError, SlotRecords, session_tag
from kvtier.tiers.secondary_tier import Outcome
from kvtier.tiers.types import EngineSession, KeyStatus

from . import inspect as inside
from .damage import Damage, damage
from .invariants import check_core
from .ledger import Ledger
from .model import EXTENT, SPECS, Invariant, ModelTier, Name, Violation, label
from .world import World

__all__ = ["Restarts"]

RATE = 0.012
"""Part of the events after which a restart is tried."""
MAX_WORK = 2000
NEW_KEYS = 24

_SPECS = {spec.id: spec for spec in SPECS}


@dataclass(slots=True)
class _Expected:
    """What a restart must find.

    Attributes:
        blocks: slots of the blocks that readers find.
        in_use: slots that are not free.
        classes: size class of each extent.
        writers: tags of the sessions with a writer connection.
        written: slots to which the clients of these sessions may write, by tag.
        stale: slots of the blocks that a reset has not dropped yet.
    """

    blocks: dict[Name, tuple[int | None, ...]]
    in_use: set[int]
    classes: dict[int, int]
    writers: set[int] = field(default_factory=set)
    written: Mapping[int, set[int]] = field(default_factory=dict)
    stale: int = 0


class _Restarted(World):
    """A core that has recovered, with what the invariants need to know. No client has a session."""

    def __init__(self, world: World, memory: bytearray, labels: dict[int, str]) -> None:
        self.recorded, self.memory, self.only = memory, labels, None
        self.region_bytes, self.now = world.region_bytes, world.environment.latest
        self.tiers = [ModelTier(tier.name, tier.capacity_bytes) for tier in world.tiers]
        self.settings_model = world.settings_model
        self.ledger, self.calls, self.steps = Ledger(len(self.tiers)), world.calls, 0
        self.records = SlotRecords(memoryview(memory), self.region_bytes, EXTENT)
        self.records.check()
        self.core = TierManager(
            self.region_bytes,
            EXTENT,
            self.tiers,
            max_queued_bytes=4 * 4096,
            settings=world.settings_model.settings,
            now=self.now,
            records=self.records,
        )
        self.backed_bytes = world.backed_bytes

    def publishing(self) -> list[Block]:
        return []

    def recover(self, writers: Collection[int]) -> RecoveredBlocks:
        """Raises RecordsError if the records are damaged."""
        recovered = self.core.recover(writers)
        self.core.add_memory(0, self.backed_bytes)
        self.core_view = inside.CoreView(self.core)
        return recovered

    def found(self) -> _Expected:
        """Returns what a restart of this core must find, if no client has a connection."""
        return _found(self.core, self.core_view)

    def end_work(self) -> None:
        """Ends all work; every job succeeds."""
        for _ in range(MAX_WORK):
            commands = self.core.take_commands()
            for command in commands:
                if isinstance(command, StoreInTier | LoadFromTier):
                    self.core.job_finished(command.job_id, [Outcome.DONE] * len(command.blocks))
                elif isinstance(command, LookupInTier):
                    self.core.lookup_finished(command.job_id, [False] * len(command.keys))
            if self.core.has_work():
                self.core.work()
            elif not commands:
                break
        else:
            raise Violation(Invariant.RESTART, "work never ends")
        self.core_view = inside.CoreView(self.core)


class Restarts:
    """Restarts of the core of a world. They have random numbers of their own."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = random.Random(f"restarts of {seed}")

    def check(self, *, always: bool = False) -> None:
        """Tries a restart at some times."""
        if self.world.only not in (None, Invariant.RESTART) or not (always or self.rng.random() < RATE):
            return
        try:
            self._restart()
        except Violation as error:
            raise Violation(Invariant.RESTART, f"after a restart: {error}") from error
        except Exception as error:
            raise Violation(Invariant.RESTART, f"a restart raised {error!r}") from error

    def _restart(self) -> None:
        world, expected = self.world, self._expected()
        if self.rng.random() < 0.4:
            self._restart_damaged(expected)
            return
        shadow = _Restarted(world, bytearray(world.recorded), dict(world.memory))
        recovered = shadow.recover(expected.writers)
        _check(shadow, recovered, expected)
        world.saw("restarts")
        world.saw("restarts during a reset", bool(expected.stale))
        world.saw("restarts with writers", any(expected.written.values()))
        if self.rng.random() < 0.5:
            self._restart_again(shadow, recovered, expected)
        if self.rng.random() < 0.5:
            self._serve(shadow, expected)
        self._end_writers(shadow, expected.writers)
        shadow.end_work()
        _check_ended(shadow)
        if self.rng.random() < 0.3:
            again = _Restarted(world, bytearray(shadow.recorded), shadow.memory)
            _check(again, again.recover(()), shadow.found())
            _check_ended(again)

    def _expected(self) -> _Expected:
        """Returns what a restart must find now."""
        world = self.world
        expected = _found(world.core, world.core_view)
        processes = (*world.ledger.clients, *world.ledger.orphans)
        expected.writers = {session_tag(each.session.id) for each in processes if each.connections}
        written = defaultdict[int, set[int]](set)
        for record in world.ledger.stores.values():
            if record.writers:
                written[session_tag(record.client.session.id)].update(record.slots)
        expected.written = written
        return expected

    def _restart_again(self, first: _Restarted, recovered: RecoveredBlocks, expected: _Expected) -> None:
        """The new server is killed at once; its clients are those of the earlier one."""
        shadow = _Restarted(self.world, bytearray(first.recorded), first.memory)
        again = shadow.recover(expected.writers)
        expected.stale = 0
        _check(shadow, again, expected)
        order = [block.name for block in recovered.blocks]
        _must([block.name for block in again.blocks] == order, "a second restart changes the order of the blocks")
        self._end_writers(shadow, expected.writers)
        _check_ended(shadow)
        self.world.saw("restarts of restarts")

    def _restart_damaged(self, expected: _Expected) -> None:
        world, memory = self.world, bytearray(self.world.recorded)
        done = damage(self.rng, memory, inside.records_of(world.core))
        try:
            shadow = _Restarted(world, memory, dict(world.memory))
            shadow.recover(expected.writers)
        except RecordsError as error:
            _must(done.refused, f"records were refused without a reason: {error}")
            world.saw("records refused")
            return
        _must(not done.refused, "records with a damaged header or slot size are used")
        _check_lost(shadow, expected, done)
        world.saw("records torn", bool(done.torn))
        world.saw("blocks lost with their records", len(shadow.core_view.ready) < len(expected.blocks))
        if self.rng.random() < 0.5:
            self._serve(shadow, expected, done)
        self._end_writers(shadow, expected.writers)
        shadow.end_work()
        _check_ended(shadow)

    def _serve(self, shadow: _Restarted, expected: _Expected, done: Damage | None = None) -> None:
        """A new client reads and stores blocks. It must get no slot that others may write to."""
        core, spec = shadow.core, self.rng.choice(SPECS)
        core.tick(shadow.now)
        session = core.open_session(b"new client", "new", 0, spec)
        self._read(shadow, session)
        group = self.rng.randrange(len(spec.part_bytes))
        keys = [b"new %d" % number + group.to_bytes(4, "big") for number in range(NEW_KEYS)]
        answer = run_to_end(core.prepare_store(session, keys, StoreSpec(lease_seconds=60), now=shadow.now))
        theirs = set().union(*expected.written.values()).difference(done.slots if done is not None else ())
        _must(theirs.isdisjoint(answer.slots), "a slot is granted to which an earlier client may write")
        if answer.store_id is not None:
            blocks = core.store(session, answer.store_id).blocks
            names = [(block.key, slot) for block in blocks for slot in block.slots if slot is not None]
            shadow.memory.update((slot, label(spec.id, key, 0)) for key, slot in names)
            run_to_end(core.complete_store(session, answer.store_id))
        core.close_session(session.id)
        self.world.saw("stores after a restart", bool(answer.slots))

    def _read(self, shadow: _Restarted, session: EngineSession) -> None:
        found = [block for block in shadow.core_view.ready if block.namespace == session.namespace.id]
        blocks = self.rng.sample(found, min(3, len(found)))
        if not blocks:
            return
        spec = LookupSpec(prefix=False, lease_seconds=60)
        answer = run_to_end(shadow.core.lookup(session, [block.key for block in blocks], spec, now=shadow.now))
        if self.world.settings_model.settings.leased_part == 1:
            _must(set(answer.statuses()) == {KeyStatus.HIT}, "a recovered block is not found")
        for block, item in zip(blocks, answer.lease.items if answer.lease is not None else (), strict=False):
            _must(item in (None, block), "a lookup finds another block")
        if answer.lease is not None:
            shadow.core.release(session, answer.lease.id)
            self.world.saw("reads after a restart")

    def _end_writers(self, shadow: _Restarted, writers: Collection[int]) -> None:
        """The clients of the earlier server end, in any order."""
        order = sorted(writers)
        self.rng.shuffle(order)
        for tag in order:
            of_tag, torn = inside.former_slots(shadow.core)
            before = inside.slots_in_use(shadow.core)
            shadow.core.former_writer_gone(tag)
            freed = before - inside.slots_in_use(shadow.core)
            due = of_tag.get(tag, set()) | (torn if tag == order[-1] else set())
            _must(freed == due, f"the end of a client frees {sorted(freed)}, not {sorted(due)}")
            shadow.core.former_writer_gone(tag)


def _found(core: TierManager, core_view: inside.CoreView) -> _Expected:
    ready = [block for block in core_view.blocks if block.ready]
    found = [block for block in ready if inside.block(core, *block.name) is block and not block.hold_only]
    blocks = {block.name: tuple(block.slots) for block in found}
    stale = sum(len(block.slots) for block in ready if block.invalidated)
    return _Expected(blocks, inside.slots_in_use(core), core_view.classes, stale=stale)


def _check(shadow: _Restarted, recovered: RecoveredBlocks, expected: _Expected) -> None:
    """Checks what a core has recovered from undamaged records."""
    blocks = {block.name: block.slots for block in recovered.blocks}
    _must(blocks == expected.blocks, f"{_differing(blocks, expected.blocks)} are not as before")
    _must(recovered.lost <= expected.stale, f"{recovered.lost} blocks are lost")
    of_tag, torn = inside.former_slots(shadow.core)
    _must(not torn, f"the records of {torn} are torn")
    for tag, slots in expected.written.items():
        _must(slots <= of_tag.get(tag, set()), f"{sorted(slots)} are not kept for their writer")
    kept = set().union(*of_tag.values())
    _must(kept <= expected.in_use, f"free slots are kept: {sorted(kept - expected.in_use)}")
    for slot in inside.slots_in_use(shadow.core):
        number = slot // EXTENT
        _must(shadow.core_view.classes[number] == expected.classes[number], f"extent {number} has another class")
    nbytes = inside.slot_bytes_of(shadow.core, kept)
    _must(recovered.unusable_bytes == nbytes, f"{recovered.unusable_bytes} bytes are unusable, not {nbytes}")
    _must(shadow.core_view.stats.quarantined_bytes == nbytes, "the figures lack the unusable slots")
    _check_blocks(shadow)


def _check_lost(shadow: _Restarted, expected: _Expected, done: Damage) -> None:
    """Checks what a core has recovered from damaged records."""
    blocks = {block.name: tuple(block.slots) for block in shadow.core_view.blocks}
    wrong = blocks.items() - expected.blocks.items()
    _must(not wrong, f"blocks that were not there: {wrong}")
    for name, slots in expected.blocks.items():
        is_hurt = not done.slots.isdisjoint(slots) or name[0] in done.namespaces
        _must(is_hurt or name in blocks, f"{name} is lost, and its records are whole")
    of_tag, torn = inside.former_slots(shadow.core)
    for tag, written in expected.written.items():
        kept = of_tag.get(tag, set()) | torn
        _must(written - done.slots <= kept, f"{sorted(written)} are not kept for their writer")
    _check_blocks(shadow)


def _check_blocks(shadow: _Restarted) -> None:
    """Checks the blocks of a core that has recovered, and that other slots are free."""
    core, view = shadow.core, shadow.core_view
    of_tag, torn = inside.former_slots(core)
    kept = torn.union(*of_tag.values())
    owned = {slot for block in view.blocks for slot in block.slots}
    _must(kept.isdisjoint(owned), "a slot of a block is kept for a writer")
    _must(inside.slots_in_use(core) == kept | owned, "a slot without an owner is in use, or one with an owner is not")
    for block in view.blocks:
        spec = _SPECS[block.namespace]
        right = block.ready and not block.pins and len(block.slots) == spec.world_size
        right = right and block.part_bytes == spec.part_bytes_of(block.key) and inside.block(core, *block.name) is block
        _must(right, f"{block!r} is not as it was stored")
        _must(block.last_use >= int(shadow.now * 1e6), f"{block!r} counts as unused for long")
        for rank, slot in enumerate(block.slots):
            _must(shadow.memory.get(slot or 0) == label(*block.name, rank), f"{block!r} has other bytes")


def _check_ended(shadow: _Restarted) -> None:
    """Checks a core after all clients of the earlier server have ended."""
    shadow.core_view = inside.CoreView(shadow.core)
    of_tag, torn = inside.former_slots(shadow.core)
    _must(
        not of_tag and not torn and not shadow.core_view.stats.quarantined_bytes,
        "slots are kept after the end of all clients",
    )
    check_core(shadow)
    if not shadow.core.has_work():
        left = {what: kept for what, kept in inside.leftovers(shadow.core).items() if ": " not in what}
        _must(not left, f"left over: {left}")


def _differing(found: Mapping[Name, object], expected: Mapping[Name, object]) -> list[Name]:
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def _must(condition: bool, text: str) -> None:  # noqa: FBT001 - a predicate
    if not condition:
        raise Violation(Invariant.RESTART, text)
