"""Simulated writers: clients that store blocks, sometimes with wrong completions."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvtier.tiers import errors
from kvtier.tiers.core.call_specs import StoreSpec
from kvtier.tiers.types import EngineSession

from . import inspect as inside
from .actors import Actors
from .ledger import StoreRecord
from .model import REQUESTS, Invariant, label
from .store_calls import Completion, Preparation
from .tier_calls import Flush
from .tier_settings import tenant_of

__all__ = ["Writers"]


class Writers(Actors):
    """Events of clients that write."""

    def actions(self) -> dict[Callable[[], None], float]:
        return {
            self.prepare_store: 14,
            self.write_a_part: 3,
            self.complete_store: 14,
            self.complete_too_late: 1,
            self.complete_twice: 0.6,
            self.complete_another_engines_store: 0.6,
            self.name_wrong_items: 0.6,
            self.flush: 1.5,
            self.reset: 0.25,
        }

    def prepare_store(self) -> None:
        if (client := self.pick_client()) is None:
            return
        session, keys = client.session, self.some_keys(client.session)
        if session.rank is None and session.namespace.world_size > 1:
            self.world.refused(errors.InvalidItem, lambda: self._prepare(session, keys))
            return
        if self.rng.random() < 0.02:
            bad = [*keys, b"no such group" + (7).to_bytes(4, "big")]
            self.world.refused(errors.InvalidKey, lambda: self._prepare(session, bad))
            return
        self.world.calls.begin(Preparation(self, client))

    def _prepare(self, session: EngineSession, keys: list[bytes]) -> None:
        next(
            self.world.core.prepare_store(
                session, keys, StoreSpec(request_id=self.rng.choice(REQUESTS), lease_seconds=0), now=0
            )
        )

    def write_a_part(self) -> None:
        """A process writes a part of a block, possibly after the end of its store."""
        for record in self.world.ledger.stores.values():
            is_writing = record.writers and (not record.is_completing or record.quarantine is not None)
            if is_writing and self.rng.random() < 0.5:
                for slot in record.slots:
                    self.world.memory[slot] = "half written"
                self.world.saw("writes after the end", record.quarantine is not None)

    def complete_store(self) -> None:
        for _ in range(1 + len(self._prepared()) // 4):
            if stores := self._prepared():
                record = self.rng.choice(stores)
                failed = {n for n in range(len(record.slots)) if self.rng.random() < 0.1}
                self._write(record, failed)
                session = self.any_of(record.client.engine)
                self.world.calls.begin(Completion(self, record.client, session, record, failed))

    def _prepared(self) -> list[StoreRecord]:
        """Returns the stores to complete, seldom also an unprepared one, whose id was guessed."""
        stores = self.world.ledger.open_stores()
        if self.rng.random() < 0.05:
            return stores
        being_prepared = [call.record for call in self.world.calls.open if isinstance(call, Preparation)]
        return [record for record in stores if record not in being_prepared]

    def _write(self, record: StoreRecord, failed: Collection[int]) -> None:
        rank = record.client.session.own_rank()
        for number, (name, slot) in enumerate(zip(record.names, record.slots, strict=True)):
            self.world.memory[slot] = "torn" if number in failed else label(*name, rank)

    def complete_too_late(self) -> None:
        """A completion after the end of its store is refused, and reports the end of the write."""
        late = [record for record in self.world.ledger.stores.values() if record.quarantine is not None]
        if not late:
            return
        record = self.rng.choice(late)
        others = [client for client in self.world.ledger.clients if client.engine != record.client.engine]
        if others and self.rng.random() < 0.4:
            self.world.core.writer_done(self.rng.choice(others).session, record.id)
            self.world.saw("late completions by a stranger")
            return
        mine = [client for client in self.world.ledger.clients if client.engine == record.client.engine]
        if not mine:
            return
        session = self.rng.choice(mine).session
        self.world.refused(errors.StoreNotFound, lambda: next(self.world.core.complete_store(session, record.id)))
        self.world.ledger.written(record)
        self.world.core.writer_done(session, record.id)
        self.world.saw("late completions")

    def complete_twice(self) -> None:
        ledger = self.world.ledger
        ended = [record for record in ledger.ended_stores if record.id not in ledger.stores]
        client = self.pick_client()
        if ended and client is not None:
            store_id = self.rng.choice(ended).id
            self.world.refused(
                errors.StoreNotFound, lambda: next(self.world.core.complete_store(client.session, store_id))
            )
            self.world.saw("stores completed twice")

    def complete_another_engines_store(self) -> None:
        stores = self.world.ledger.open_stores()
        record = self.rng.choice(stores) if stores else None
        stranger = self.session_of_another(record.client.engine) if record is not None else None
        if record is None or stranger is None:
            return
        core, expires_at = self.world.core, self.world.now + 1000
        same_tenant = tenant_of(stranger.namespace.id) == tenant_of(record.client.session.namespace.id)
        refusal = errors.NotOwner if same_tenant else errors.StoreNotFound
        self.world.refused(refusal, lambda: next(core.complete_store(stranger, record.id)))
        self.world.refused(refusal, lambda: core.renew_store(stranger, record.id, expires_at))
        core.writer_done(stranger, record.id)
        self.world.saw("strangers' stores completed")

    def name_wrong_items(self) -> None:
        """A completion with an item that was not granted is refused, and the store continues."""
        if stores := self.world.ledger.open_stores():
            record = self.rng.choice(stores)
            session, wrong = self.any_of(record.client.engine), [len(record.slots)]
            self.world.refused(
                errors.InvalidItem, lambda: next(self.world.core.complete_store(session, record.id, wrong))
            )
            self.world.saw("wrong items named")

    def reset(self) -> None:
        """Resets the CPU tier of a namespace; pinned blocks are dropped with their last pin."""
        if (client := self.pick_client()) is None:
            return
        core, namespace = self.world.core, client.session.namespace.id
        waiting = core.resetting(client.session)
        before = {block for block in inside.blocks(core) if block.namespace == namespace}
        left = core.reset(client.session, retire=True)
        pinned = {block for block in before if block.pins and not block.stalled}
        expected = waiting or len(pinned.union(inside.unswept(core, namespace)))
        self.world.must(Invariant.RESET, left == expected, f"{left} blocks are awaited, not {expected}")
        if not waiting:
            self.world.ledger.gone[namespace] = before
            self.world.ledger.holds.reset(namespace)
            self.world.saw("resets that wait", bool(left))

    def flush(self) -> None:
        if client := self.pick_client():
            self.world.calls.begin(Flush(self, client))
