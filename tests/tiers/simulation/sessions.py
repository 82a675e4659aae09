"""Simulated engines: they open and close sessions, map the region, and begin and end requests."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.tiers.secondary_tier import OffloadPolicy, RequestInfo
from kvtier.tiers.types import NamespaceSpec

from . import inspect as inside
from .actors import Actors
from .ledger import Client, StoreRecord
from .model import CONVERSATIONS, REQUESTS, SPECS, Invariant

__all__ = ["Sessions"]


class Sessions(Actors):
    """Events of engines besides reads and writes."""

    opened = 0
    connections = 0

    def actions(self) -> dict[Callable[[], None], float]:
        return {
            self.open_session: 2,
            self.close_session: 0.8,
            self.reopen_session: 0.6,
            self.attach: 0.5,
            self.hang_up: 1,
            self.begin_request: 4,
            self.finish_request: 3,
        }

    def open_session(self) -> None:
        if len(self.world.ledger.clients) > 8:
            return
        spec = self.rng.choice(SPECS)
        rank = self.rng.randrange(spec.world_size) if self.rng.random() < 0.85 else None
        self._open(self.rng.choice("xyz"), rank, spec)

    def _open(self, engine: str, rank: int | None, spec: NamespaceSpec) -> Client:
        self.opened += 1
        session = self.world.core.open_session(b"%07d session" % self.opened, engine, rank, spec, tenant="t")
        client = Client(session)
        self.world.ledger.clients.append(client)
        if self.rng.random() < 0.7:
            self._attach(client)
        return client

    def attach(self) -> None:
        """A process maps the region, possibly once more."""
        if client := self.pick_client():
            self._attach(client)

    def _attach(self, client: Client) -> None:
        self.connections += 1
        self.world.core.writer_attached(client.session.id, self.connections)
        client.connections.add(self.connections)

    def hang_up(self) -> None:
        """A connection ends: its process has ended, or has stopped copying."""
        connected = [c for c in (*self.world.ledger.clients, *self.world.ledger.orphans) if c.connections]
        if not connected:
            return
        client = self.rng.choice(connected)
        connection = self.rng.choice(sorted(client.connections))
        client.connections.remove(connection)
        if not client.connections and client in self.world.ledger.orphans:
            self.world.ledger.orphans.remove(client)
        quarantined = self.world.core.stats().quarantined_bytes
        self.world.ledger.disconnected(connection)
        self.world.core.writer_gone(client.session.id, connection)
        self.world.saw("quarantine lifted", self.world.core.stats().quarantined_bytes < quarantined)

    def close_session(self) -> None:
        if client := self.pick_client():
            self._close(client)

    def _close(self, client: Client) -> None:
        mine = [record for record in self.world.ledger.in_flight() if record.client is client]
        self.world.saw("sessions ended during a store", bool(mine))
        self.world.saw("slots quarantined", bool(mine and client.connections))
        split = [record for record in mine if client.session.namespace.world_size > 1 and self._half_written(record)]
        self.world.saw("ranks died between prepare and commit", bool(split))
        self.world.ledger.client_closed(client)
        self.world.core.close_session(client.session.id)

    def _half_written(self, record: StoreRecord) -> bool:
        return any(block.written or block.writers > 1 for block in record.blocks)

    def reopen_session(self) -> None:
        """A session ends, and its process opens another with the same engine id."""
        if client := self.pick_client():
            self._close(client)
            self._open(client.session.engine_id, client.session.rank, client.session.namespace)
            self.world.saw("sessions reopened")

    def begin_request(self) -> None:
        if (client := self.pick_client()) is None:
            return
        session, request_id, book = client.session, self.rng.choice(REQUESTS), self.world.ledger.requests
        params = {"do_remote_decode": self.rng.random() < 0.5}
        info = RequestInfo(
            request_id,
            session.namespace.id,
            kv_transfer_params=params,
            retain_for=self.retain_for(),
            conversation_id=self.rng.choice(CONVERSATIONS),
        )
        negotiation = self.world.core.begin_request(session, info)
        policy = max((vote.policy for _, vote in negotiation.votes), default=OffloadPolicy.BLOCK_LEVEL)
        self.world.must(Invariant.FINISH, negotiation.policy == policy, "one tier that insists is enough")
        known = book.get(session.engine, request_id)
        if known is None or known.finished or known.session.ended:
            record = book.begin(session, request_id, negotiation)
            record.known = inside.request(self.world.core, session.engine, request_id)

    def finish_request(self) -> None:
        if (client := self.pick_client()) is None:
            return
        session, request_id, book = client.session, self.rng.choice(REQUESTS), self.world.ledger.requests
        record = book.get(session.engine, request_id)
        ends = record is not None and record.session.ended and not record.finished
        known = self.world.core.finish_request(session, request_id)
        book.finish_of_ended_sessions()
        if record is None or (ends and record.known is not known):  # the core has ended it first
            record = book.begin(session, request_id, known.negotiation)
        self.world.must(Invariant.FINISH, record.known in (None, known), f"{request_id!r}: not the one that was begun")
        record.finished, record.known = True, known
        self.world.saw("finished while blocks are owed", bool(record.pending_stores))
        self.world.saw("finished while blocks are parked", bool(record.parked))
        self.world.ledger.request_finished(session.engine, request_id)
