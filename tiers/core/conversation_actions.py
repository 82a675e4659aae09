"""Actions on the blocks of conversations, in slices: retain, release, demote and delete.

Conversations share blocks, for example of a system prompt. A conversation therefore demotes and
deletes only blocks that no other conversation uses, and releases only blocks that no other retained
conversation uses. Actions on a list of keys have no such exceptions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import RetentionFull
from ..secondary_tier import NamespaceId
from ..stats.snapshots import ConversationStats
from .block import Block
from .bulk_eviction import SecondaryTierSource
from .conversations import Conversation, ConversationTable
from .cpu_tier import CpuTier
from .operations import Operation
from .tier_jobs import TierJobs

__all__ = ["ActionCounts", "BlockAction", "ConversationTask", "ConversationTasks", "TierUse"]

PIN_SECONDS = 10 * 365 * 86400.0
"""Retention of pinned blocks."""
_PINNED_SECONDS = PIN_SECONDS / 2
"""A block that is retained for longer is pinned. Requests cannot retain blocks for so long."""

SLICE = 256
"""Keys per slice: an action takes 2 to 6 µs per key."""

_SEARCHES = 16_384
"""A release searches each key in every other retained conversation. Limit of searches per slice."""


class BlockAction(enum.Enum):
    """PIN retains blocks until UNPIN. No other action shortens the retention of pinned blocks."""

    RETAIN = enum.auto()
    PIN = enum.auto()
    RELEASE = enum.auto()
    UNPIN = enum.auto()
    DEMOTE = enum.auto()
    DELETE = enum.auto()


_RETAINING = (BlockAction.RETAIN, BlockAction.PIN)


@dataclass(slots=True)
class ActionCounts:
    """Numbers of blocks. Each block counts once.

    Attributes:
        changed: blocks that the action has changed in any tier.
        shared: blocks left alone, because another conversation uses them.
        kept: blocks left alone for another reason: they are pinned or in use, they are in only one
            tier (demote), or the CPU tier cannot retain it (retain): its budget is used up, or
            the extent of the block retires.
        missing: blocks that no tier has.
    """

    changed: int = 0
    shared: int = 0
    kept: int = 0
    missing: int = 0


@dataclass(slots=True)
class TierUse:
    """Blocks of a conversation in one tier."""

    blocks: int = 0
    nbytes: int = 0
    retained: int = 0


@dataclass(slots=True)
class ConversationTask:
    """A running action.

    Attributes:
        targets: the keys of each namespace, and their conversation; None for a list of keys.
        until: end of the retention, in seconds of the core's clock.
        before: end of the earlier retention of each block that a PIN has pinned so far.
    """

    action: BlockAction
    targets: Sequence[tuple[NamespaceId, Sequence[bytes], Conversation | None]]
    until: float = 0.0
    counts: ActionCounts = field(default_factory=ActionCounts)
    before: dict[tuple[NamespaceId, bytes], float] = field(default_factory=dict)

    @property
    def conversations(self) -> list[Conversation]:
        return [conversation for _, _, conversation in self.targets if conversation is not None]


class ConversationTasks:
    def __init__(
        self, cpu_tier: CpuTier, tier_jobs: TierJobs, perform: Callable[[Operation[ActionCounts]], None]
    ) -> None:
        """`perform` performs an operation that no call waits for."""
        self.table = ConversationTable()
        self._perform = perform
        self._undone: dict[tuple[NamespaceId, bytes], float] = {}
        """End of the earlier retention of each block that a cancelled PIN still retains."""
        self._cpu_tier = cpu_tier
        self._tier_jobs = tier_jobs

    @property
    def now(self) -> float:
        return self._cpu_tier.queues.now

    def act(
        self, action: BlockAction, conversations: Sequence[Conversation], seconds: float = 0.0
    ) -> Operation[ActionCounts]:
        """Acts on the blocks of conversations. Blocks of later requests are retained, too.

        Of pinned conversations only RETAIN, PIN and UNPIN change blocks. If the operation ends
        early, the blocks of the earlier slices stay changed, but a PIN is undone, because no record
        would show it. `seconds`: retention by RETAIN. Raises RetentionFull, before any change, if
        the blocks to retain exceed the budget.
        """
        acts_on_pinned = action in _RETAINING or action is BlockAction.UNPIN
        acted_on = [each for each in conversations if acts_on_pinned or not each.pinned]
        targets = [(each.namespace.id, list(each.keys), each) for each in acted_on]
        task = ConversationTask(action, targets, self._until(action, seconds))
        task.counts.kept = sum(len(each.keys) for each in conversations) - sum(len(keys) for _, keys, _ in targets)
        return self._run(task)

    def act_on_keys(
        self, action: BlockAction, targets: Sequence[tuple[NamespaceId, Sequence[bytes]]], seconds: float = 0.0
    ) -> Operation[ActionCounts]:
        """Acts on the keys of each namespace. Raises like `act`."""
        unique = [(namespace, list(dict.fromkeys(keys)), None) for namespace, keys in targets]
        return self._run(ConversationTask(action, unique, self._until(action, seconds)))

    def _until(self, action: BlockAction, seconds: float) -> float:
        return self.now + (PIN_SECONDS if action is BlockAction.PIN else seconds)

    def _run(self, task: ConversationTask) -> Operation[ActionCounts]:
        for conversation in task.conversations if task.action not in _RETAINING else ():
            conversation.retain_until = 0.0
            conversation.pinned &= task.action is not BlockAction.UNPIN
        yield None  # also an action on few keys takes a turn
        run = {
            BlockAction.RETAIN: self._retain,
            BlockAction.PIN: self._retain,
            BlockAction.RELEASE: self._release,
            BlockAction.UNPIN: self._release,
            BlockAction.DEMOTE: self._demote,
            BlockAction.DELETE: self._delete,
        }
        retained = [(each, each.retain_until) for each in task.conversations]
        try:
            yield from run[task.action](task)
        except BaseException:
            if task.action is BlockAction.PIN:
                self._undo(task, retained)
            raise
        for conversation in task.conversations if task.action is BlockAction.PIN else ():
            conversation.pinned = conversation.is_open
            conversation.retain_until = max(conversation.retain_until, task.until)
        return task.counts

    def _undo(self, task: ConversationTask, retained: Sequence[tuple[Conversation, float]]) -> None:
        """Ends what a PIN has retained, in slices, unless another action changes it first."""
        for conversation, until in retained:
            if not conversation.pinned:
                conversation.retain_until = until
        runs = bool(self._undone)
        self._undone.update(task.before)
        if not runs:
            self._perform(self._shorten_undone())

    def _shorten_undone(self) -> Operation[ActionCounts]:
        while self._undone:
            for _ in range(min(SLICE, len(self._undone))):
                (namespace, key), until = self._undone.popitem()
                self._shorten(namespace, key, until)
            yield None
        return ActionCounts()

    def stats(self) -> ConversationStats:
        return ConversationStats(len(self.table), self.table.keys, self.table.forgotten)

    def use_of(self, conversation: Conversation) -> Operation[list[TierUse]]:
        """Returns the use of each tier, in lookup order."""
        namespace, found = conversation.namespace.id, [TierUse() for _ in range(1 + len(self._tier_jobs.secondaries))]
        yield None
        for keys in slices_of_keys(list(conversation.keys), SLICE):
            for key in keys:
                block = self._cpu_tier.blocks_of(namespace).get(key)
                if block is not None and block.ready:
                    _count(found[0], self._cpu_tier.nbytes_of(block), retained=block.retained)
                for secondary in self._tier_jobs.secondaries:
                    entry = secondary.catalog.held(namespace, key)
                    if entry is not None:
                        _count(found[secondary.index], entry.nbytes, retained=entry.retained)
            yield None
        return found

    def _retain(self, task: ConversationTask) -> Operation[None]:
        yield from self._check_budget(task)
        for conversation in task.conversations:
            conversation.retain_until = max(conversation.retain_until, task.until)
        for namespace, keys, _ in _slices(task, SLICE):
            self._remember(task, namespace, keys)
            in_cpu = [block for key in keys if (block := self._block(namespace, key)) is not None]
            excess = set(self._cpu_tier.retain(in_cpu, task.until))
            self._tier_jobs.retain(in_cpu)
            names = {block.key for block in in_cpu}
            below = [key for key in keys if key not in names]
            retained = {key for key in below if self._retain_below(namespace, key, task.until)}
            task.counts.kept += len(excess)
            task.counts.changed += len(in_cpu) - len(excess) + len(retained)
            task.counts.missing += len(below) - len(retained)
            yield None

    def _remember(self, task: ConversationTask, namespace: NamespaceId, keys: Sequence[bytes]) -> None:
        """Notes the earlier retention of blocks for the end of this PIN, or of a cancelled one."""
        for name in ((namespace, key) for key in keys):
            if task.action is BlockAction.PIN:
                before = self._undone.pop(name) if name in self._undone else self._retained_until(*name)
                task.before.setdefault(name, before)
            elif name in self._undone:
                self._undone[name] = max(self._undone[name], task.until)

    def _retain_below(self, namespace: NamespaceId, key: bytes, until: float) -> bool:
        """Retains a block in each tier that has it; returns whether there is such a tier."""
        found = False
        for secondary in self._tier_jobs.secondaries:
            entry = secondary.catalog.held(namespace, key)
            if entry is not None:
                secondary.catalog.queues.retain([entry], until)
                found = True
        return found

    def _check_budget(self, task: ConversationTask) -> Operation[None]:
        """Raises RetentionFull if the CPU tier cannot retain all blocks that it has."""
        needed: dict[int, int] = {}
        for namespace, keys, _ in _slices(task, SLICE):
            for key in keys:
                block = self._block(namespace, key)
                if block is None or block.retained:
                    continue
                budget = block.queue.share.budget
                needed[id(budget)] = needed.get(id(budget), 0) + block.allocated_bytes
                if budget.used + needed[id(budget)] > budget.bound:
                    raise RetentionFull(
                        f"the CPU tier may retain {budget.bound} bytes for this tenant and already retains "
                        f"{budget.used} of them"
                    )
            yield None

    def _release(self, task: ConversationTask) -> Operation[None]:
        others = self.table.retained({namespace for namespace, _, _ in task.targets}, self.now)
        for namespace, keys, conversation in _slices(task, max(1, min(SLICE, _SEARCHES // (1 + len(others))))):
            for key in keys:
                found, until = self._has(namespace, key), 0.0
                if found and task.action is not BlockAction.UNPIN and self._is_pinned(namespace, key):
                    task.counts.kept += 1
                    continue
                if conversation is not None and self.table.users(namespace, key) > 1:
                    until = max(map(_end_of_retention, _users_of(others, namespace, key, conversation)), default=0.0)
                self._shorten(namespace, key, until)
                task.counts.missing += not found
                task.counts.shared += found and until > 0
                task.counts.changed += found and not until
            yield None

    def _demote(self, task: ConversationTask) -> Operation[None]:
        for namespace, keys, conversation in _slices(task, SLICE):
            for key in keys:
                block = self._block(namespace, key)
                if block is None:
                    found = self._has(namespace, key)  # in a lower tier, where the order stays
                    task.counts.kept += found
                    task.counts.missing += not found
                elif self._is_shared(namespace, key, conversation):
                    task.counts.shared += 1
                elif self._is_pinned(namespace, key) or self._tier_jobs.residency.position_of(namespace, key) is None:
                    task.counts.kept += 1
                else:
                    self._shorten(namespace, key, 0.0)
                    changed = self._cpu_tier.queues.demote(block)
                    task.counts.changed += changed
                    task.counts.kept += not changed
            yield None

    def _delete(self, task: ConversationTask) -> Operation[None]:
        sources = self._tier_jobs.sources(self._cpu_tier.used_at)
        kept: set[Conversation] = set()
        for namespace, keys, conversation in _slices(task, SLICE):
            gone = [key for key in keys if self._delete_one(task, sources, namespace, key, conversation)]
            if conversation is not None:
                self.table.discard(conversation, gone)
                if len(gone) < len(keys):
                    kept.add(conversation)
            yield None
        for conversation in task.conversations:
            if conversation not in kept:
                self.table.forget(conversation)

    def _delete_one(
        self,
        task: ConversationTask,
        sources: Sequence[SecondaryTierSource],
        namespace: NamespaceId,
        key: bytes,
        conversation: Conversation | None,
    ) -> bool:
        """Deletes a block from all tiers; returns False if the block is in use."""
        if self._is_shared(namespace, key, conversation):
            task.counts.shared += 1
            return True
        block = self._block(namespace, key)
        entries = [(each, entry) for each in sources if (entry := each.entry(namespace, key)) is not None]
        is_busy = block is not None and not self._cpu_tier.is_evictable(block, retained=True)
        if (
            is_busy
            or self._is_pinned(namespace, key)
            or not all(each.is_evictable(entry, retained=True) for each, entry in entries)
        ):
            task.counts.kept += 1
            return False
        if block is not None:
            self._cpu_tier.evict([block])
        for each, entry in entries:
            each.evict([entry])
        found = block is not None or bool(entries)
        task.counts.changed += found
        task.counts.missing += not found
        return True

    def _block(self, namespace: NamespaceId, key: bytes) -> Block | None:
        """Returns a block of the CPU tier that is ready or pending."""
        block = self._cpu_tier.blocks_of(namespace).get(key)
        return block if block is not None and (block.ready or block.pending) and not block.hold_only else None

    def _has(self, namespace: NamespaceId, key: bytes) -> bool:
        if self._block(namespace, key) is not None:
            return True
        return self._tier_jobs.residency.position_of(namespace, key) is not None

    def _is_pinned(self, namespace: NamespaceId, key: bytes) -> bool:
        """Returns whether a tier retains a block for as long as only pins do."""
        return (namespace, key) not in self._undone and (
            self._retained_until(namespace, key) > self.now + _PINNED_SECONDS
        )

    def _retained_until(self, namespace: NamespaceId, key: bytes) -> float:
        """Returns the latest end of the retention of a block in any tier; 0 if none retains it."""
        until, block = 0.0, self._block(namespace, key)
        if block is not None and block.retained:
            until = self._cpu_tier.queues.retained_until(block)
        for secondary in self._tier_jobs.secondaries:
            entry = secondary.catalog.get(namespace, key)
            if entry is not None and entry.retained:
                until = max(until, secondary.catalog.queues.retained_until(entry))
        return until

    def _is_shared(self, namespace: NamespaceId, key: bytes, conversation: Conversation | None) -> bool:
        return conversation is not None and self.table.users(namespace, key) > (key in conversation.keys)

    def _shorten(self, namespace: NamespaceId, key: bytes, until: float) -> None:
        self._undone.pop((namespace, key), None)
        block = self._block(namespace, key)
        if block is not None:
            block.retain_until = until
            self._cpu_tier.queues.shorten([block], until)
            self._cpu_tier.made_room()
        for secondary in self._tier_jobs.secondaries:
            entry = secondary.catalog.get(namespace, key)
            if entry is not None:
                secondary.catalog.queues.shorten([entry], until)


def slices_of_keys(keys: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    return (keys[start : start + size] for start in range(0, len(keys), size))


def _slices(task: ConversationTask, size: int) -> Iterator[tuple[NamespaceId, Sequence[bytes], Conversation | None]]:
    for namespace, keys, conversation in task.targets:
        for some in slices_of_keys(keys, size):
            yield namespace, some, conversation


def _users_of(
    conversations: Sequence[Conversation], namespace: NamespaceId, key: bytes, but: Conversation
) -> Iterator[Conversation]:
    return (each for each in conversations if each is not but and each.namespace.id == namespace and key in each.keys)


def _end_of_retention(conversation: Conversation) -> float:
    return conversation.retain_until


def _count(use: TierUse, nbytes: int, *, retained: bool) -> None:
    use.blocks += 1
    use.nbytes += nbytes
    use.retained += retained
