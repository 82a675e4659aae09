"""Simulated routers: they retain, pin, demote, release and delete blocks by conversation or key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtier.tiers import errors
from kvtier.tiers.core.block import Block
from kvtier.tiers.core.conversation_tasks import BlockAction, ConversationTask
from kvtier.tiers.core.manager import TierManager

from . import inspect as inside
from .actors import Actors
from .model import SPECS, Invariant, Name

__all__ = ["Conversations"]


@dataclass
class _Running:
    """An action in slices, and the core that it acts on."""

    core: TierManager
    task: ConversationTask
    names: list[Name]
    refused: bool = False


class Conversations(Actors):
    """Events of clients without a session, which act on the blocks of requests."""

    _running: _Running | None = None

    def actions(self) -> dict[Callable[[], None], float]:
        return {self.begin_action: 1, self.continue_action: 2, self.act_at_once: 3}

    def begin_action(self) -> None:
        """An action begins; its slices run between other events."""
        self._running = self._begin()

    def continue_action(self) -> None:
        running = self._running
        if running is None or running.core is not self.world.core or not self._work(running):
            self._running = None

    def act_at_once(self) -> None:
        """An action that no other event interrupts: its effects are known."""
        running = self._begin()
        shared = {block for block in self._blocks(running) if block.ready and self._is_shared(running, block)}
        pinned = running.task.counts.kept
        while self._work(running):
            pass
        task, counts = running.task, running.task.counts
        if running.refused:
            return
        counted = counts.changed + counts.shared + counts.kept + counts.missing
        self._must(counted == pinned + len(running.names), f"{counts} for {len(running.names)} keys")
        now = self.world.core.conversations.now
        blocks = [block for block in self._blocks(running) if block.ready]
        entries = [entry for here in inside.CoreView(self.world.core).entries for entry in here]
        held = {entry.name for entry in entries if entry.state is inside.EntryState.HELD} & set(running.names)  # type: ignore[attr-defined]
        if task.action is BlockAction.RETAIN and not counts.kept and task.until > now:
            self._must(all(block.retained for block in blocks), "a block is not retained, and not counted")
            self.world.saw("blocks retained by conversation", counts.changed > 0)
        others = {
            (each.namespace.id, key)
            for each in inside.conversations(self.world.core)[0]
            if each.retain_until > now and each not in [target[2] for target in task.targets]
            for key in each.keys
        }
        if task.action is BlockAction.RELEASE and not counts.kept:
            kept = [block for block in blocks if block.retained and block.name not in others]
            self._must(not kept, "a released block is still retained")
            self.world.saw("blocks released", counts.changed > 0)
        if task.action is BlockAction.DEMOTE:
            demoted = set[Block]().union(*inside.next_victims(self.world.core)).intersection(self._blocks(running))
            self._must(len(demoted) >= counts.changed, f"{counts}, demoted {len(demoted)}")
            self._must(not any(block.retained for block in demoted), "a block is demoted and retained")
            self.world.saw("blocks demoted", counts.changed > 0)
        if task.action is BlockAction.DELETE:
            left = {block.name for block in blocks} | held
            self._must(all(block.ready for block in shared), "a block of another conversation was deleted")
            self._must(len(left) <= counts.shared + counts.kept, f"{counts}, left {len(left)}")
            self.world.saw("blocks deleted", counts.changed > 0)
            self.world.saw("blocks of several conversations kept", counts.shared > 0)

    def _begin(self) -> _Running:
        core, rng = self.world.core, self.rng
        tasks, action = core.conversations, rng.choice([*BlockAction, "pin", "unpin"])
        seconds = rng.choice((0, 10, 60, 4000))
        if rng.random() < 0.3:
            spec = rng.choice(SPECS)
            keys = self.some_keys_of(len(spec.part_bytes), "x")
            if action == "unpin":
                task = tasks.unpin_keys(spec.id, keys)
            else:
                task = tasks.act_on_keys(BlockAction.RETAIN if action == "pin" else action, spec.id, keys, seconds)
        else:
            known = inside.conversations(core)[0]
            some = rng.sample(known, min(len(known), rng.choice((1, 1, 2))))
            if action == "pin":
                some = some if rng.random() < 0.3 else []
                task = tasks.pin(some)
            elif action == "unpin":
                task = tasks.unpin(some)
            elif action is BlockAction.RETAIN:
                task = tasks.retain(some, seconds)
            else:
                task = tasks.act(action, some)
        return _Running(core, task, [(namespace, key) for namespace, keys, _ in task.targets for key in keys])

    def _work(self, running: _Running) -> bool:
        """Runs a slice, and records its effects on retention."""
        try:
            more = running.task.work()
        except errors.RetentionFull:
            running.refused = True
            self.world.saw("retention refused")
            return False
        book = self.world.settings_model
        if running.task.action is BlockAction.DELETE:
            self.world.deleted = set(running.names)
        queues = running.core._cpu_tier.queues
        for block in self._blocks(running):
            if block.retained:
                book.retained[block] = queues.retained_until(block) - 1.0
            else:
                book.retained.pop(block, None)
        return more

    def _blocks(self, running: _Running) -> Iterator[Block]:
        found = (inside.block(running.core, *name) for name in running.names)
        return (block for block in found if block is not None and not block.hold_only)

    def _is_shared(self, running: _Running, block: Block) -> bool:
        """Returns whether a conversation that is no target of an action uses a block."""
        targets = [target[2] for target in running.task.targets]
        known = inside.conversations(self.world.core)[0] if None not in targets else []
        return any(
            each.namespace.id == block.namespace and block.key in each.keys for each in known if each not in targets
        )

    def _must(self, condition: object, text: str) -> None:
        self.world.must(Invariant.CONVERSATIONS, bool(condition), text)
