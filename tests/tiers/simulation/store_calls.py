"""Simulated stores: calls that prepare and complete them in slices."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from kvtier.tiers import errors
from kvtier.tiers.core.call_specs import StoreSpec
from kvtier.tiers.core.conversations import Conversation
from kvtier.tiers.core.in_flight_stores import Preparation as State
from kvtier.tiers.core.operations import Operation
from kvtier.tiers.types import EngineSession, StoreStatus

from . import inspect as inside
from .actors import HOLD_SECONDS, Actors
from .calls import Call
from .ledger import Client, StoreRecord
from .model import REQUESTS, Invariant
from .requests import RequestRecord
from .tier_settings import tenant_of

__all__ = ["Completion", "Preparation"]


class Preparation(Call):
    """A call that prepares a store. The store is in the ledger from the first slice on."""

    kind: ClassVar[str] = "preparations"
    event: ClassVar[str] = "prepare_store"

    def __init__(self, actors: Actors, client: Client) -> None:
        super().__init__(actors, client)
        rng = actors.rng
        self.keys, self.request_id = actors.some_keys(self.session), rng.choice(REQUESTS)
        self.seconds, self.retain_for = rng.choice(HOLD_SECONDS), actors.retain_for()
        self.retain_until = 0.0
        self.conversation: Conversation | None = None
        """The conversation of the request before the step."""
        self.record: StoreRecord | None = None
        self.preparation: State | None = None
        """The state of the call; None before the first step."""

    def begin(self) -> Operation[Any]:
        return self.world.core.prepare_store(
            self.session,
            self.keys,
            StoreSpec(request_id=self.request_id, lease_seconds=self.seconds, retain_for=self.retain_for),
            now=self.world.now,
            slice_keys=self.size,
        )

    def step(self) -> bool:
        if self.operation is None:
            self.retain_until = self.actors.retain_until(self.session, self.request_id, self.retain_for)
            self.operation = self.begin()
            self.preparation = inside.state_of(self.operation, "preparation")
        state = self._state
        start, granted, not_retained = len(state.statuses), len(state.slots), state.not_retained
        # A request that has finished ends with a store without blocks.
        self.conversation = inside.conversation_of(self.world.core, self.session, self.request_id)
        if self.record is not None and not self._is_open(self.record):
            self.world.refused(errors.StoreNotFound, lambda: self.next_step(self.world.now))
            self.world.saw("stores ended during their preparation")
            return False
        more = self.next_step(self.world.now)
        part, statuses = self.keys[start : len(state.statuses)], bytes(state.statuses[start:])
        if part:
            self._check_slice(part, statuses, state.slots[granted:], state.not_retained - not_retained)
        must, answer = self.world.must, self.answer
        has_blocks = self.record is not None and bool(self.record.blocks)
        has_id = state.store is not None
        must(Invariant.SLOTS, has_id == (has_blocks or (more and bool(part or start))), "a store id for granted blocks")
        if not more:
            must(Invariant.SLOTS, len(answer.statuses) == len(self.keys), "a status per key")
            must(Invariant.SLOTS, (answer.store_id is None) != has_id, "an answer with another store")
            if self.record is not None and not has_id:
                self.world.ledger.written(self.record)
        return more

    def _check_slice(self, part: list[bytes], statuses: bytes, slots: list[int], not_retained: int) -> None:
        self._check_use(part, statuses, not_retained)
        self._check_conversation(part)
        granted = [key for key, status in zip(part, statuses, strict=True) if status == StoreStatus.GRANTED]
        self.world.must(Invariant.SLOTS, len(granted) == len(slots), "a slot per granted block")
        request = self.world.ledger.requests.named(self.session.engine, self.request_id)
        if request is not None and request.request_level_tiers:
            names = {(self.session.namespace.id, key) for key in granted}
            self.world.insisted_on(request, dict.fromkeys(part), names, self.session)
        self._extend(slots, request)

    @property
    def _state(self) -> State:
        assert self.preparation is not None
        return self.preparation

    def _is_open(self, record: StoreRecord) -> bool:
        return record in self.world.ledger.open_stores()

    def _check_use(self, keys: list[bytes], statuses: bytes, not_retained: int) -> None:
        retain_until = self.actors.used_by(self.conversation, keys, self.retain_until)
        taken = [key for key, status in zip(keys, statuses, strict=True) if status != StoreStatus.NO_ROOM]
        blocks = [inside.block(self.world.core, self.session.namespace.id, key) for key in taken]
        found = [block for block in blocks if block is not None]
        self.actors.used(self.session, found, retain_until, not_retained)
        self.world.saw("no room", StoreStatus.NO_ROOM in statuses)

    def _check_conversation(self, keys: list[bytes]) -> None:
        """The conversation of a request has all keys of a store, unless it was forgotten."""
        conversation = self.conversation
        if conversation is not None and conversation.is_open:
            room = inside.CONVERSATION_LIMITS["KEYS"] - len(conversation.latest)
            self.world.must(
                Invariant.CONVERSATIONS, conversation.keys.keys() >= set(keys) or room <= 0, "a used key is missing"
            )

    def _extend(self, slots: list[int], request: RequestRecord | None) -> None:
        if (store := self._state.store) is None:
            return
        ledger, expires_at = self.world.ledger, self.world.now + self.seconds
        if self.record is None:
            if request is not None:
                request.stores += 1
            self.record = StoreRecord(store.id, self.client, request, [], [], expires_at)
            ledger.stores[store.id] = self.record
        self.record.blocks = list(store.blocks)
        self.record.slots += slots
        self.record.expires_at = max(self.record.expires_at, expires_at)
        self.world.memory.update(dict.fromkeys(slots, "unwritten"))

    def abandon(self) -> None:
        """The core ends the store, whose slots no client knows."""
        if self.record is not None and self._is_open(self.record):
            self.world.ledger.written(self.record)
        super().abandon()


class Completion(Call):
    """The completion of a store. If its session ends, the core abandons the rest of the store."""

    kind: ClassVar[str] = "completions"
    event: ClassVar[str] = "complete_store"
    is_cancellable: ClassVar[bool] = False
    begins_at_once: ClassVar[bool] = True

    def __init__(
        self, actors: Actors, client: Client, session: EngineSession, record: StoreRecord, failed: Collection[int]
    ) -> None:
        super().__init__(actors, client)
        self.session, self.record, self.failed, self.completed = session, record, failed, 0
        self.world.saw("parts failed", bool(failed))

    def begin(self) -> Operation[Any]:
        record = self.record
        record.is_completing = True
        return self.world.core.complete_store(self.session, record.id, self.failed, slice_blocks=self.size)

    def step(self) -> bool:
        ledger, record = self.world.ledger, self.record
        if record.quarantine is not None or ledger.stores.get(record.id) is not record:
            return self._continue_without_store()
        is_long, is_new = len(record.blocks) > self.size, self.operation is None
        count = 0 if is_new and is_long else min(self.size, len(record.blocks))
        blocks, numbers = record.blocks[:count], range(self.completed, self.completed + count)
        self.completed += count
        record.blocks, record.slots = record.blocks[count:], record.slots[count:]
        if not record.blocks:
            ledger.written(record)
        part = 1 << (record.client.session.rank or 0)
        # A block that is evicted when its last pin ends, because its extent retires, was ready too.
        ready = [
            block
            for number, block in zip(numbers, blocks, strict=True)
            if number not in self.failed
            and not block.namespace_index.invalidated
            and block.written | part == (1 << len(block.slots)) - 1
        ]
        more = self.next_step(self.world.now)
        self.world.must(Invariant.SLOTS, more == bool(record.blocks), "a completion of other blocks than were granted")
        self.world.settings_model.takers.add(tenant_of(record.client.session.namespace.id))
        if record.request is not None:
            self.world.is_due(record.request, [block.name for block in ready])
        return more

    def _continue_without_store(self) -> bool:
        """The core has abandoned the store, because its session has ended."""
        before = self.world.core.stats()
        more = self.next_step(self.world.now)
        must_not = more or self.world.core.stats() != before
        self.world.must(Invariant.OWNERS, not must_not, "a completion continues after its store was abandoned")
        self.world.saw("completions continued after their session")
        return False
