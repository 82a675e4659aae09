"""Nodes of a Valkey or Redis store: one server, or those of a cluster by hash slot.

A cluster divides all names into 16,384 slots by their CRC16, and each slot has one node. The names
of blocks have no braces, so a slot depends on the whole name.
"""

from __future__ import annotations

import re
import threading
import time
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..secondary_tier import TierError
from .circuit_breaker import CircuitBreaker
from .dialing import ServerAddress, is_local
from .object_store import StoreRefusedError, StoreUnavailableError
from .resp import Answer, command
from .valkey_store import ValkeyStore

__all__ = ["SLOTS", "ValkeyNodes", "owners_in", "slot_of"]

SLOTS = 16384
REFRESH_SECONDS = 1.0
"""Minimum time between two reads of a cluster's slots."""
MAX_NODES = 1000
"""Limit of the nodes of a cluster with slots. Valkey recommends at most as many."""
_HOST = re.compile(r"[\w.:%-]{1,253}", re.ASCII)


def slot_of(name: bytes) -> int:
    """Returns the hash slot of a name without braces."""
    return crc_hqx(name, 0) % SLOTS


@dataclass(frozen=True, slots=True)
class _Table:
    """Node of each slot, None for a slot without a node; one entry if there is no cluster."""

    owners: list[str | None]

    @property
    def is_cluster(self) -> bool:
        return len(self.owners) > 1

    @property
    def nodes(self) -> list[str]:
        return sorted({owner for owner in self.owners if owner})


class ValkeyNodes:
    """`Topology` that asks the servers whether they are a cluster. Thread-safe."""

    def __init__(
        self,
        seeds: Sequence[ServerAddress],
        open_client: Callable[[ServerAddress, float, Callable[[], None]], ValkeyStore],
        deadline_seconds: float,
    ) -> None:
        """`open_client` gets a server, a deadline, and what to call if a name has moved."""
        self._endpoints = {str(seed): seed for seed in seeds}
        self._seeds = list(self._endpoints)
        self._open_client = open_client
        self._deadline_seconds = deadline_seconds
        self._table: _Table | None = None
        self._is_stale = False
        self._refresh_at = 0.0
        self._refreshing = threading.Lock()
        self._breaker = CircuitBreaker()
        self._order = list(self._seeds)
        """Nodes and seeds; those that failed are asked last."""

    def nodes(self) -> list[str]:
        return self._current().nodes

    def nodes_of(self, names: Sequence[bytes]) -> list[str | None]:
        owners = self._current().owners
        if len(owners) == 1:
            return owners * len(names)
        return [owners[slot_of(name)] for name in names]

    def connect(self, node: str) -> ValkeyStore:
        endpoint = self._endpoints.get(node)
        if endpoint is None:
            raise StoreUnavailableError("the node has left the cluster")
        return self._open_client(endpoint, self._deadline_seconds, self._moved)

    def failed(self, node: str) -> None:
        self._ask_last(node)
        table = self._table
        self._is_stale |= table is not None and table.is_cluster

    def _moved(self) -> None:
        self._is_stale = True

    def _current(self) -> _Table:
        """Returns the newest known nodes. Reads them first if none are known or they are stale."""
        table = self._table
        if table is None:
            with self._refreshing:
                return self._table or self._refresh()
        if self._is_stale and time.monotonic() >= self._refresh_at and self._refreshing.acquire(blocking=False):
            try:
                with suppress(TierError):  # the nodes that are known may still answer
                    table = self._refresh()
            finally:
                self._refreshing.release()
        return table

    def _refresh(self) -> _Table:
        if not self._breaker.permits():
            raise StoreUnavailableError(self._breaker.reason)
        self._refresh_at = time.monotonic() + REFRESH_SECONDS
        self._is_stale = False
        try:
            table = self._ask_in_turn()
        except StoreUnavailableError as error:
            self._is_stale = True
            self._breaker.failed(str(error))
            raise
        except TierError:
            self._breaker.succeeded()  # an answer, although not the desired one
            raise
        self._breaker.succeeded()
        self._table = table
        return table

    def _ask_in_turn(self) -> _Table:
        """Asks the nodes and seeds until one answers or the deadline is over."""
        ends_at = time.monotonic() + self._deadline_seconds
        failures: dict[str, str] = {}
        for node in list(self._order):
            left = ends_at - time.monotonic()
            if left <= 0:
                break
            # One node that hangs leaves time for the next one.
            seconds = left if len(self._order) == 1 else min(left, self._deadline_seconds / 2)
            client = self._open_client(self._endpoints[node], seconds, self._moved)
            try:
                return self._ask(client, node)
            except StoreUnavailableError as error:
                failures[node] = str(error)
                self._ask_last(node)
            finally:
                client.close()
        raise StoreUnavailableError("; ".join(f"{node}: {text}" for node, text in failures.items()))

    def _ask_last(self, node: str) -> None:
        with suppress(ValueError):  # another thread may do the same
            self._order.remove(node)
            self._order.append(node)

    def _ask(self, client: ValkeyStore, node: str) -> _Table:
        [info] = client.run([command(b"INFO", b"cluster")])
        if not isinstance(info, bytes) or b"cluster_enabled:1" not in info:
            if len(self._seeds) > 1:
                raise StoreRefusedError(f"{node} is not in a cluster; `url` must have one address")
            return _Table([node])
        [answer] = client.run([command(b"CLUSTER", b"SLOTS")])
        owners = owners_in(answer, self._endpoints[node].host)
        endpoints = {str(owner): owner for owner in owners if owner}
        if not endpoints:
            raise StoreUnavailableError(f"{node}: no node of the cluster has slots")
        seeds = {name: self._endpoints[name] for name in self._seeds}
        self._endpoints = endpoints | seeds
        self._order = [*(name for name in endpoints if name not in self._order), *self._order]
        self._order = [name for name in self._order if name in endpoints or name in self._seeds]
        return _Table([str(owner) if owner else None for owner in owners])


def owners_in(answer: Answer, asked_host: str) -> list[ServerAddress | None]:
    """Returns the primary of each slot in an answer to `CLUSTER SLOTS`.

    Raises `StoreUnavailableError` if the answer is not valid. A node without a host is the host
    that was asked. A node can have any address of the network, because a cluster can grow, but not
    one of this host: this server sends the password to it.
    """
    owners: list[ServerAddress | None] = [None] * SLOTS
    known: set[ServerAddress] = set()
    for entry in answer if isinstance(answer, list) else [None]:
        match entry:
            case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if (
                0 <= first <= last < SLOTS and 0 < port < 1 << 16
            ):
                name = (host or b"").decode("utf-8", "replace") or asked_host
                owner = ServerAddress(name, port, may_be_local=is_local(asked_host))
                if not _HOST.fullmatch(name) or (is_local(name) and not owner.may_be_local):
                    raise StoreUnavailableError(f"the store names a node at {owner!s:.99}, which is no remote host")
                known.add(owner)
                if len(known) > MAX_NODES:
                    raise StoreUnavailableError(f"the store names more than {MAX_NODES} nodes")
                owners[first : last + 1] = [owner] * (last + 1 - first)
            case _:
                raise StoreUnavailableError("the store sends invalid slots of its cluster")
    return owners
