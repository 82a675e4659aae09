"""What the server says that its tiers hold, compared with what the clients have recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.raw import RawSession

from kvtier.client import Namespace
from kvtier.protos.v1 import events_pb2, events_pb2_grpc
from kvtier.protos.wire.packed_keys import unpack_key_list
from kvtier.server.rpc.sessions import namespace_spec
from stress.durable_ledger import Entry
from stress.final_checks import FILL, fill_keys
from stress.shape import DATASETS, LEDGER, PAIR

__all__ = ["Held", "KnownBlocks", "held_by", "read_inventory"]

Held = Mapping[tuple[str, bytes], set[bytes]]
"""Keys by name of the tier and id of the namespace."""

_REPLAY_SECONDS = 60.0
_MOST_FILL = 1 << 12
"""More blocks than the region has slots for the blocks of `final_checks.fill`."""


def held_by(responses: Iterable[events_pb2.WatchEventsResponse]) -> Held:
    """Applies the responses of `WatchEvents` up to the end of the first complete replay."""
    held: dict[tuple[str, bytes], set[bytes]] = {}
    for response in responses:
        if response.phase == events_pb2.REPLAY_PHASE_BEGIN:
            held = {}
        for event in response.events:
            keys = held.setdefault((event.tier, event.namespace_id), set())
            match event.kind:
                case events_pb2.BLOCK_EVENT_KIND_STORED:
                    keys.update(unpack_key_list(event.keys))
                case events_pb2.BLOCK_EVENT_KIND_REMOVED:
                    keys.difference_update(unpack_key_list(event.keys))
                case events_pb2.BLOCK_EVENT_KIND_CLEARED:
                    keys.clear()
        if response.phase == events_pb2.REPLAY_PHASE_END:
            return held
    raise ConnectionError("the stream of events ended before its replay")


def read_inventory(endpoint: str) -> Held:
    """Reads what all tiers hold now, in all namespaces. Raises `grpc.RpcError` or OSError."""
    with RawSession(endpoint, LEDGER.namespace, engine_id="inventory") as session:
        stream = events_pb2_grpc.EventServiceStub(session.channel).WatchEvents(
            events_pb2.WatchEventsRequest(session=session.ref, all_namespaces=True), timeout=_REPLAY_SECONDS
        )
        try:
            return held_by(stream)
        finally:
            stream.cancel()


def _id_of(namespace: Namespace) -> bytes:
    return bytes(namespace_spec(namespace.to_proto()).id)


@dataclass
class KnownBlocks:
    """Every block that a client may have stored, and every block that must be present."""

    _others: dict[bytes, set[bytes]] = field(default_factory=dict)
    """Keys of documents that are not deposits, by namespace."""
    _intended: dict[str, list[bytes]] = field(default_factory=dict)
    """Keys of deposits that were begun, by document and number."""
    _intended_keys: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        for dataset in (*DATASETS.values(), PAIR):
            documents = range(dataset.documents)
            keys = {key for document in documents for key in dataset.keys(document, 0, dataset.length)}
            self._others[_id_of(dataset.namespace)] = keys
        self._others[_id_of(FILL)] = set(fill_keys(_MOST_FILL))

    def intend(self, intended: Mapping[str, int]) -> None:
        """Adds the deposits that were begun: per document the number below which they are."""
        for document, end in intended.items():
            keys = self._intended.setdefault(document, [])
            new = LEDGER.keys(document, len(keys), end - len(keys))
            keys += new
            self._intended_keys.update(new)

    def never_stored(self, held: Held) -> Iterator[str]:
        """The blocks of an inventory that no client has begun to store."""
        ledger = _id_of(LEDGER.namespace)
        for (tier, namespace), keys in held.items():
            known = self._intended_keys if namespace == ledger else self._others.get(namespace, set())
            for key in keys - known:
                yield f"{tier} lists {key.hex()} of namespace {namespace.hex()[:16]}"

    def lost(self, held: Held, tier: str, acknowledged: Sequence[Entry]) -> Iterator[str]:
        """The acknowledged deposits that this tier does not list."""
        keys = held.get((tier, _id_of(LEDGER.namespace)), set())
        for document, number in acknowledged:
            if self._intended[document][number] not in keys:
                yield f"{document} {number}: not listed by {tier}"
