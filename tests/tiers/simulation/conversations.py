"""Simulated routers: they retain, pin, demote, release and delete blocks by conversation or key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from kvtier.tiers import errors
from kvtier.tiers.core.block import Block
from kvtier.tiers.core.conversation_actions import BlockAction, ConversationTask
from kvtier.tiers.core.operations import Operation

from . import inspect as inside
from .actors import Actors
from .calls import Call
from .model import SPECS, Invariant, Name

__all__ = ["Conversations"]


class Action(Call):
    """An action on the blocks of conversations or of a list of keys."""

    kind: ClassVar[str] = "actions on conversations"
    event: ClassVar[str] = "act"

    def __init__(self, actors: Actors) -> None:
        super().__init__(actors, None)
        self.operation = self.begin()
        self.task: ConversationTask = inside.state_of(self.operation, "task")
        self.names: list[Name] = [(namespace, key) for namespace, keys, _ in self.task.targets for key in keys]
        self.is_refused = False

    def begin(self) -> Operation[Any]:
        core, rng = self.world.core, self.actors.rng
        action, seconds = rng.choice(list(BlockAction)), rng.choice((0, 10, 60, 4000))
        if rng.random() < 0.3:
            specs = rng.sample(SPECS, rng.choice((1, 1, 2)))
            targets = [(spec.id, self.actors.some_keys_of(len(spec.part_bytes), "x")) for spec in specs]
            return core.act_on_keys(action, targets, seconds)
        known = inside.conversations(self.world.core)[0]
        some = rng.sample(known, min(len(known), rng.choice((1, 1, 2))))
        if action is BlockAction.PIN and rng.random() < 0.7:
            some = []
        return core.act_on_conversations(action, some, seconds)

    def step(self) -> bool:
        """Runs a slice, and records its effects on retention."""
        try:
            more = self.next_step(self.world.now)
        except errors.RetentionFull:
            self.is_refused = True
            self.world.saw("retention refused")
            return False
        book, queues = self.world.settings_model, inside.queues_of_cpu(self.world.core)
        if self.task.action is BlockAction.DELETE:
            self.world.deleted = set(self.names)
        for block in self.blocks():
            if block.retained:
                book.retained[block] = queues.retained_until(block) - 1.0
            else:
                book.retained.pop(block, None)
        return more

    def abandon(self) -> None:
        """As `Call.abandon`. A PIN is undone, in slices: its blocks stay as long as before."""
        before, retained = dict(self.task.before), self.world.settings_model.retained
        super().abandon()
        for block in self.blocks():
            if block in retained and block.name in before:
                retained[block] = min(retained[block], before[block.name] - 1.0)

    def blocks(self) -> Iterator[Block]:
        found = (inside.block(self.world.core, *name) for name in self.names)
        return (block for block in found if block is not None and not block.hold_only)

    def is_shared(self, block: Block) -> bool:
        """Returns whether a conversation that is no target of the action uses a block."""
        targets = [target[2] for target in self.task.targets]
        known = inside.conversations(self.world.core)[0] if None not in targets else []
        return any(
            each.namespace.id == block.namespace and block.key in each.keys for each in known if each not in targets
        )


class Conversations(Actors):
    """Events of clients without a session, which act on the blocks of requests."""

    def actions(self) -> dict[Callable[[], None], float]:
        return {self.act: 2, self.act_at_once: 2}

    def act(self) -> None:
        self.world.calls.begin(Action(self))

    def act_at_once(self) -> None:
        """An action that no other event interrupts: its effects are known."""
        running = Action(self)
        task, counts = running.task, running.task.counts
        shared = {block for block in running.blocks() if block.ready and running.is_shared(block)}
        pinned = counts.kept
        while running.step():
            pass
        if running.is_refused:
            return
        self._must(running.answer is counts, "an answer with other counts")
        counted = counts.changed + counts.shared + counts.kept + counts.missing
        self._must(counted == pinned + len(running.names), f"{counts} for {len(running.names)} keys")
        now = self.world.core._conversations.now
        blocks = [block for block in running.blocks() if block.ready]
        entries = [entry for here in inside.CoreView(self.world.core).entries for entry in here]
        held = {entry.name for entry in entries if entry.state is inside.EntryState.HELD} & set(running.names)  # type: ignore[attr-defined]
        if task.action in (BlockAction.RETAIN, BlockAction.PIN) and not counts.kept and task.until > now:
            self._must(all(block.retained for block in blocks), "a block is not retained, and not counted")
            self.world.saw("blocks retained by conversation", counts.changed > 0)
        others = {
            (each.namespace.id, key)
            for each in inside.conversations(self.world.core)[0]
            if each.retain_until > now and each not in [target[2] for target in task.targets]
            for key in each.keys
        }
        if task.action in (BlockAction.RELEASE, BlockAction.UNPIN) and not counts.kept:
            kept = [block for block in blocks if block.retained and block.name not in others]
            self._must(not kept, "a released block is still retained")
            self.world.saw("blocks released", counts.changed > 0)
        if task.action is BlockAction.DEMOTE:
            demoted = set[Block]().union(*inside.next_victims(self.world.core)).intersection(running.blocks())
            self._must(len(demoted) >= counts.changed, f"{counts}, demoted {len(demoted)}")
            self._must(not any(block.retained for block in demoted), "a block is demoted and retained")
            self.world.saw("blocks demoted", counts.changed > 0)
        if task.action is BlockAction.DELETE:
            left = {block.name for block in blocks} | held
            self._must(all(block.ready for block in shared), "a block of another conversation was deleted")
            self._must(len(left) <= counts.shared + counts.kept, f"{counts}, left {len(left)}")
            self.world.saw("blocks deleted", counts.changed > 0)
            self.world.saw("blocks of several conversations kept", counts.shared > 0)

    def _must(self, condition: object, text: str) -> None:
        self.world.must(Invariant.CONVERSATIONS, bool(condition), text)
