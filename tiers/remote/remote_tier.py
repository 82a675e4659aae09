"""Tier in a key-value store that several servers share over the network.

The store is a cache of its own: it evicts, and it limits the life of values. A server writes a
value once, never replaces it, and deletes it only if its bytes are wrong.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..secondary_tier import BlockBytes, NamespaceId, Outcome, TierError
from ..storage.batching import batches
from . import value_codec
from .limits import AvoidedNames
from .network_tier import NetworkTier, RemoteLimits
from .object_store import ObjectStore, StoreRefusedError, StoreUnavailableError, Topology
from .value_codec import ValueCodec, is_name, name_of

__all__ = ["RemoteTier"]

_log = logging.getLogger(__name__)

WINDOW_BYTES = 16 << 20
"""Limit of the bytes of one call: 16 MiB in 250 ms are 0.5 Gbit/s."""
UNREADABLE_SECONDS = 7200.0
"""A value that this server cannot decode is not asked for again during this time."""
UNREADABLE_TTL_SECONDS = 3600.0
"""Time to live of a value that this server cannot decode, unless a server that can uses it."""
LOST_DEADLINES = 4.0
"""A job ends after it has waited this many deadlines for nodes without an answer. A cluster of a
thousand such nodes would otherwise keep a thread for minutes."""
LOOKUP_NAMES = 1024
"""Limit of the names of one call."""

T = TypeVar("T")


class RemoteTier(NetworkTier):
    """Tier in a key-value store, with one value per block."""

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        *,
        topology: Topology,
        limits: RemoteLimits,
        codec: ValueCodec = value_codec,
    ) -> None:
        """Connects on first use, so that the server starts without the store.

        `capacity_bytes` limits the blocks that this server remembers, not the store. Each worker
        thread has a client of each node.
        """
        super().__init__(name, capacity_bytes, limits=limits, codec=codec)
        self._topology = topology
        self._window_bytes = min(WINDOW_BYTES, limits.in_flight_bytes)
        self._unreadable = AvoidedNames(UNREADABLE_SECONDS)
        self._mine = threading.local()
        self._clients: list[ObjectStore] = []
        self._connecting = threading.Lock()

    def lookup(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> list[bool]:
        """Asks the nodes. A node that does not answer has none of the blocks."""
        names = {place: name_of(*key, self._codec.FORMAT) for place, key in enumerate(keys) if is_name(*key)}
        avoided = self._avoided()
        places = [place for place, name in names.items() if name not in avoided]
        answers = [False] * len(keys)
        with self._reporting("lookup") as errors:
            for node, numbers in self._by_node([names[place] for place in places]).items():
                if errors.lost_seconds > LOST_DEADLINES * self._limits.deadline_seconds:
                    break
                with errors.kept():
                    for start in range(0, len(numbers), LOOKUP_NAMES):
                        some = [places[number] for number in numbers[start : start + LOOKUP_NAMES]]
                        asked = [names[place] for place in some]
                        found = self._call(node, lambda client, asked=asked: client.exists(asked))  # type: ignore[misc]
                        for place, is_found in zip(some, found, strict=True):
                            answers[place] = is_found
        return answers

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Writes the blocks that the store lacks. After an error the node's other blocks fail."""
        return self._move("store", blocks, self._store_window, Outcome.FAILED)

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Reads and verifies blocks. Deletes damaged ones.

        After an error the node's other blocks fail. The memory of a block that is not DONE may have
        been written.
        """
        return self._move("load", blocks, self._load_window, Outcome.MISSING)

    def free_disk_bytes(self) -> None:
        """Returns None. Checks all nodes, so that the status is right without any traffic."""
        with self._reporting("check") as errors:
            nodes = self._ask_topology(lambda topology: topology.nodes())
            self._forget_nodes_except(nodes)
            for node in nodes:
                if errors.lost_seconds > LOST_DEADLINES * self._limits.deadline_seconds:
                    break
                with errors.kept():
                    self._call(node, lambda client: client.ping())

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _move(
        self,
        operation: str,
        blocks: Sequence[BlockBytes],
        move_window: Callable[[str, Sequence[BlockBytes]], list[Outcome]],
        without_name: Outcome,
    ) -> list[Outcome]:
        """Moves blocks node by node, and those of a node in windows of limited size."""
        valid = [place for place, block in enumerate(blocks) if self._can_move(block)]
        outcomes = [without_name] * len(blocks)
        for place in valid:
            outcomes[place] = Outcome.FAILED
        with self._reporting(operation) as errors:
            names = self._names_of([blocks[place] for place in valid])
            for node, numbers in self._by_node(names).items():
                if errors.lost_seconds > LOST_DEADLINES * self._limits.deadline_seconds:
                    break
                places = iter([valid[number] for number in numbers])
                with errors.kept():
                    for window in batches([blocks[valid[number]] for number in numbers], self._window_bytes):
                        with self._budget.reserve(sum(map(self._codec.value_bytes, window))):
                            for outcome, place in zip(move_window(node, window), places, strict=False):
                                outcomes[place] = outcome
            if Outcome.NO_SPACE in outcomes:
                raise TierError("the store is full and does not evict: see its maxmemory-policy")
        return outcomes

    def _names_of(self, blocks: Sequence[BlockBytes]) -> list[bytes]:
        return [name_of(block.namespace, block.key, self._codec.FORMAT) for block in blocks]

    def _by_node(self, names: Sequence[bytes]) -> dict[str, list[int]]:
        """Returns the places of the names at each node. Raises if the nodes are not known."""
        places: dict[str, list[int]] = {}
        if not names:
            return places
        nodes = self._ask_topology(lambda topology: topology.nodes_of(names))
        if not all(nodes):
            self._health.report("nodes", "some slots of the cluster have no node")
        for place, node in enumerate(nodes):
            if node:
                places.setdefault(node, []).append(place)
        return places

    def _ask_topology(self, ask: Callable[[Topology], T]) -> T:
        try:
            answer = ask(self._topology)
        except StoreUnavailableError as error:
            self._health.report("nodes", f"{error}")
            raise
        self._health.report("nodes", None)
        return answer

    def _store_window(self, node: str, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        ttl, names, avoided = self._limits.ttl_seconds, self._names_of(blocks), self._avoided()
        places = [place for place, name in enumerate(names) if name not in avoided]
        outcomes = [Outcome.MISSING] * len(blocks)
        there = self._call(node, lambda client: client.renew([names[place] for place in places], ttl)) if places else []
        missing = [place for place, found in zip(places, there, strict=True) if not found]
        for place in places:
            outcomes[place] = Outcome.DONE
        if missing:

            def value_of(number: int) -> list[bytes | memoryview]:
                return self._codec.encode(blocks[missing[number]])

            new_names = [names[place] for place in missing]
            stored = self._call(node, lambda client: client.put(new_names, value_of, ttl))
            for place, outcome in zip(missing, stored, strict=True):
                outcomes[place] = outcome
        return outcomes

    def _load_window(self, node: str, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        names, values = self._names_of(blocks), [self._codec.pieces_of(block) for block in blocks]
        keys = self._codec.known_keys()
        sizes: list[int] = []
        outcomes: list[Outcome] = []

        def load(client: ObjectStore) -> None:
            """Decodes each value while the store sends the next ones."""
            found = client.get(names, values, self._limits.ttl_seconds)
            for block, pieces, size in zip(blocks, values, found, strict=True):
                sizes.append(size or 0)
                outcomes.append(Outcome.MISSING if size is None else self._decode(block, pieces, size))

        self._call(node, load)
        # The others are deleted after their next load: each deletion can take as long as a call.
        ends_at = time.monotonic() + self._limits.deadline_seconds
        for place, outcome in enumerate(outcomes):
            if outcome is Outcome.CORRUPT and time.monotonic() < ends_at:
                outcomes[place] = self._delete(node, blocks[place], names[place], values[place], sizes[place])
        received = zip(names, outcomes, sizes, strict=True)
        unreadable = [name for name, outcome, size in received if outcome is Outcome.MISSING and size]
        if unreadable and keys == self._codec.known_keys():
            self._avoid(node, unreadable)
        return outcomes

    def _avoided(self) -> AvoidedNames:
        return self._unreadable.with_keys(self._codec.known_keys())

    def _avoid(self, node: str, unreadable: Sequence[bytes]) -> None:
        """Shortens the life of values that this server cannot decode, and avoids their names.

        Otherwise a key that no server has any more would keep the names of used blocks for ever.
        """
        self._avoided().add(unreadable)
        with contextlib.suppress(TierError):  # a user who may only read
            ttl = min(UNREADABLE_TTL_SECONDS, self._limits.ttl_seconds)
            self._call(node, lambda client: client.renew(unreadable, ttl))

    def _decode(self, block: BlockBytes, pieces: Sequence[memoryview], nbytes: int) -> Outcome:
        """Decodes a value. One that is larger than its pieces is corrupt.

        It is MISSING, which means that it is not deleted, if it is too large to be read for that.
        """
        if nbytes > self._window_bytes + self._codec.value_bytes(block):
            return Outcome.MISSING
        if nbytes > self._codec.value_bytes(block):
            return Outcome.CORRUPT
        try:
            return self._codec.decode(pieces, nbytes, block)
        except TierError:
            return Outcome.FAILED

    def _delete(self, node: str, block: BlockBytes, name: bytes, pieces: Sequence[memoryview], nbytes: int) -> Outcome:
        """Deletes a corrupt value unless another server has replaced it. Returns the outcome."""
        try:
            if nbytes > self._codec.value_bytes(block):  # its bytes are not known
                pieces = [memoryview(bytearray(nbytes))]
                sizes = self._call(node, lambda client: list(client.get([name], [pieces], self._limits.ttl_seconds)))
                outcome = self._codec.decode(pieces, nbytes, block) if sizes == [nbytes] else Outcome.CORRUPT
                if sizes != [nbytes] or outcome is not Outcome.CORRUPT:
                    return outcome
            _log.warning("tier %s: block %s is corrupt and is deleted", self.name, block.key.hex())
            value = b"".join(pieces)[:nbytes]
            self._call(node, lambda client: client.delete_if_equal(name, [value]))
        except TierError:
            return Outcome.FAILED
        return Outcome.CORRUPT

    def _call(self, node: str, call: Callable[[ObjectStore], T]) -> T:
        """Calls a node if its breaker permits it. Raises StoreUnavailableError and others."""

        def call_client() -> T:
            try:
                return call(self._client_of_this_thread(node))
            except StoreUnavailableError:
                self._topology.failed(node)
                raise
            except TierError as error:
                raise StoreRefusedError(f"{node}: {error}") from error

        return self._guarded(node, call_client)

    def _client_of_this_thread(self, node: str) -> ObjectStore:
        clients: dict[str, ObjectStore] = self._mine.__dict__.setdefault("clients", {})
        if node not in clients:
            new = self._topology.connect(node)
            self._close_clients_except(clients, {node, *self._topology.nodes()})
            clients[node] = new
            with self._connecting:
                self._clients.append(new)
        return clients[node]

    def _close_clients_except(self, clients: dict[str, ObjectStore], nodes: set[str]) -> None:
        """Closes the clients of this thread for nodes that have left the cluster."""
        for node in clients.keys() - nodes:
            client = clients.pop(node)
            with self._connecting:
                self._clients.remove(client)
            client.close()

    def _forget_nodes_except(self, nodes: Sequence[str]) -> None:
        """Forgets the errors of nodes that have left the cluster."""
        for node in set(self._breakers) - set(nodes):
            del self._breakers[node]
            self._health.report(f"node {node}", None)
