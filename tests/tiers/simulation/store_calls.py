"""Simulated stores: calls that prepare and complete them in slices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from kvtier.tiers import errors
from kvtier.tiers.types import EngineSession, StoreAnswer, StoreStatus

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
        self.seconds, self.retain_for = rng.choice(HOLD_SECONDS), rng.choice((0, 0, 0, 10, 60, 4000))
        self.record: StoreRecord | None = None
        self.done = 0

    def step(self) -> bool:
        part = self.keys[self.done :] if self.size is None else self.keys[self.done : self.done + self.size]
        self.done += len(part)
        more = self.done < len(self.keys)
        if self.record is not None and not self._is_open(self.record):
            self.world.refused(errors.StoreNotFound, lambda: self._prepare(part, more=more))
            self.world.saw("stores ended during their preparation")
            return False
        # The last slice can end the store, and with it the request.
        retain_until = self.world.now + self.retain_for if self.retain_for else 0.0
        retain_until = self.actors.conversation_used(self.session, self.request_id, part, retain_until)
        answer = self._prepare(part, more=more)
        self._check_use(part, answer, retain_until)
        self._check_conversation(part)
        granted = [key for key, status in zip(part, answer.statuses, strict=True) if status == StoreStatus.GRANTED]
        must = self.world.must
        must(Invariant.SLOTS, len(granted) == len(answer.slots), "a slot per granted block")
        request = self.world.ledger.requests.get(self.session.engine, self.request_id)
        if request is not None and request.request_level_tiers:
            names = {(self.session.namespace.id, key) for key in granted}
            self.world.insisted_on(request, dict.fromkeys(part), names, self.session)
        self._extend(answer, request)
        has_blocks = self.record is not None and bool(self.record.blocks)
        must(Invariant.SLOTS, (answer.store_id is not None) == (has_blocks or more), "a store id for granted blocks")
        if self.record is not None and answer.store_id is None:
            self.world.ledger.written(self.record)
        return more

    def _prepare(self, keys: Sequence[bytes], *, more: bool) -> StoreAnswer:
        now = self.world.now
        return self.world.core.prepare_store(
            self.session,
            keys,
            request_id=self.request_id,
            expires_at=now + self.seconds,
            retain_until=now + self.retain_for if self.retain_for else 0.0,
            extends=self.record.id if self.record is not None else None,
            more=more,
        )

    def _is_open(self, record: StoreRecord) -> bool:
        return record in self.world.ledger.open_stores()

    def _check_use(self, keys: list[bytes], answer: StoreAnswer, retain_until: float) -> None:
        taken = [key for key, status in zip(keys, answer.statuses, strict=True) if status != StoreStatus.NO_ROOM]
        blocks = [inside.block(self.world.core, self.session.namespace.id, key) for key in taken]
        found = [block for block in blocks if block is not None]
        self.actors.used(self.session, found, retain_until, answer.not_retained)
        self.world.saw("no room", StoreStatus.NO_ROOM in answer.statuses)

    def _check_conversation(self, keys: list[bytes]) -> None:
        """The conversation of a request has all keys of a store, unless it was forgotten."""
        conversation = inside.conversation_of(self.world.core, self.session, self.request_id)
        if conversation is not None and conversation.is_open:
            room = inside.CONVERSATION_LIMITS["KEYS"] - len(conversation.latest)
            self.world.must(
                Invariant.CONVERSATIONS, conversation.keys.keys() >= set(keys) or room <= 0, "a used key is missing"
            )

    def _extend(self, answer: StoreAnswer, request: RequestRecord | None) -> None:
        if answer.store_id is None:
            return
        ledger, expires_at = self.world.ledger, self.world.now + self.seconds
        if self.record is None:
            if request is not None:
                request.stores += 1
            self.record = StoreRecord(answer.store_id, self.client, request, [], [], expires_at)
            ledger.stores[answer.store_id] = self.record
        self.record.blocks = list(self.world.core.store(self.session, answer.store_id).blocks)
        self.record.slots += answer.slots
        self.record.expires_at = max(self.record.expires_at, expires_at)
        self.world.memory.update(dict.fromkeys(answer.slots, "unwritten"))

    def abandon(self) -> None:
        """The server completes the store, of which no block was written."""
        if self.record is not None and self._is_open(self.record):
            failed = range(len(self.record.slots))
            self.world.calls.begin(Completion(self.actors, self.client, self.session, self.record, failed))


class Completion(Call):
    """The completion of a store. If its session ends, the core abandons the rest of the store."""

    kind: ClassVar[str] = "completions"
    event: ClassVar[str] = "complete_store"
    is_cancellable: ClassVar[bool] = False

    def __init__(
        self, actors: Actors, client: Client, session: EngineSession, record: StoreRecord, failed: Collection[int]
    ) -> None:
        super().__init__(actors, client)
        self.record, self.failed, self.completed = record, failed, 0
        record.is_completing = True
        self.store = self.world.core.store_handler.begin_completion(session, record.id, failed)
        self.world.saw("parts failed", bool(failed))

    def step(self) -> bool:
        core, ledger, record = self.world.core, self.world.ledger, self.record
        if record.quarantine is not None or ledger.stores.get(record.id) is not record:
            before = core.stats()
            more = core.store_handler.complete_slice(self.store, self.size)
            must_not = more or core.stats() != before
            self.world.must(Invariant.OWNERS, not must_not, "a completion continues after its store was abandoned")
            self.world.saw("completions continued after their session")
            return False
        blocks = record.blocks[: self.size]
        numbers = range(self.completed, self.completed + len(blocks))
        self.completed += len(blocks)
        record.blocks, record.slots = record.blocks[len(blocks) :], record.slots[len(blocks) :]
        if not record.blocks:
            ledger.written(record)
        more = core.store_handler.complete_slice(self.store, self.size)
        self.world.must(Invariant.SLOTS, more == bool(record.blocks), "a completion of other blocks than were granted")
        self.world.settings_model.takers.add(tenant_of(record.client.session.namespace.id))
        if record.request is not None:
            written = [block for number, block in zip(numbers, blocks, strict=True) if number not in self.failed]
            self.world.is_due(record.request, [block.name for block in written if block.ready])
        return more

    def abandon(self) -> None:
        """The session has ended, and the core has abandoned the store."""
