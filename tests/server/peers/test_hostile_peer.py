"""A server of the list that answers searches with wrong counts, ids, ports and sizes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from kvtier.client import KVTierError
from kvtier.protos.credentials import Credentials
from kvtier.protos.endpoint import Endpoint
from kvtier.protos.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    common_pb2,
    session_pb2,
    session_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)
from kvtier.server.peers import link
from kvtier.server.peers.link import PeerLease, PeerLink
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.types import KeyStatus

KEYS = [b"a" * 20, b"b" * 20]
HITS = bytes([KeyStatus.HIT] * 2)


@dataclass
class Peer(
    session_pb2_grpc.SessionServiceServicer,
    cache_pb2_grpc.CacheServiceServicer,
    transfer_pb2_grpc.TransferServiceServicer,
):
    session_id: bytes = bytes(16)
    socket_port: int = 1
    statuses: bytes = HITS
    prefix_hits: int = 2
    releases: int = 0
    hangs: bool = False
    grants: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    withdrawn: asyncio.Queue[list[int]] = field(default_factory=asyncio.Queue)

    async def Open(self, _: object, __: object) -> AsyncIterator[Any]:  # noqa: N802
        yield session_pb2.OpenResponse(session=common_pb2.SessionRef(session_id=self.session_id, epoch=1))
        await asyncio.Event().wait()

    async def Locate(self, _: object, __: object) -> Any:  # noqa: N802
        return transfer_pb2.LocateResponse(socket_port=self.socket_port)

    async def Lookup(self, request: cache_pb2.LookupRequest, _: object) -> Any:  # noqa: N802
        self.grants.put_nowait(request.grant_id)
        if self.hangs:
            await asyncio.Event().wait()
        return cache_pb2.LookupResponse(statuses=self.statuses, prefix_hits=self.prefix_hits, lease_id=7)

    async def WithdrawGrants(self, request: cache_pb2.WithdrawGrantsRequest, _: object) -> Any:  # noqa: N802
        self.withdrawn.put_nowait(list(request.grant_ids))
        return cache_pb2.WithdrawGrantsResponse()

    async def ReleaseLease(self, _: object, __: object) -> Any:  # noqa: N802
        self.releases += 1
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def _link_to(peer: Peer) -> AsyncIterator[PeerLink]:
    server = grpc.aio.server()
    session_pb2_grpc.add_SessionServiceServicer_to_server(peer, server)
    cache_pb2_grpc.add_CacheServiceServicer_to_server(peer, server)
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    searching = PeerLink(Endpoint(host="127.0.0.1", port=port), Credentials(insecure=True), "me")
    try:
        yield searching
    finally:
        await searching.close()
        await server.stop(None)


async def _search(searching: PeerLink) -> PeerLease | None:
    until = asyncio.get_running_loop().time() + 30
    async with asyncio.timeout_at(until):
        return await searching.search(
            NamespaceId(b"space"), common_pb2.Namespace(world_size=1), KEYS, prefix=True, until=until
        )


async def _found(peer: Peer, searches: int = 1) -> set[tuple[bytes, int]]:
    """Searches at this peer. Returns the keys with their positions in the lease."""
    async with _link_to(peer) as searching:
        for _ in range(searches):
            lease = await _search(searching)
        return set(lease.items.items()) if lease is not None else set()


async def test_a_right_answer() -> None:
    assert await _found(Peer()) == {(KEYS[0], 0), (KEYS[1], 1)}
    assert await _found(Peer(prefix_hits=1)) == {(KEYS[0], 0)}


async def test_more_hits_than_keys() -> None:
    """Only keys that were asked for are found."""
    assert await _found(Peer(prefix_hits=(1 << 32) - 1)) == {(KEYS[0], 0), (KEYS[1], 1)}


@pytest.mark.parametrize(
    "peer",
    [
        Peer(statuses=b""),
        Peer(statuses=HITS[:1]),
        Peer(statuses=HITS * 1000),
        Peer(statuses=bytes(3 << 20)),
        Peer(session_id=b""),
        Peer(session_id=bytes(100_000)),
        Peer(socket_port=65536),
        Peer(socket_port=(1 << 32) - 1),
    ],
    ids=["no status", "too few", "too many", "huge", "no id", "long id", "port", "largest port"],
)
async def test_a_wrong_answer_is_a_failure_of_this_peer(peer: Peer) -> None:
    """It counts for the circuit breaker of the peer, and reaches no thread that loads blocks."""
    with pytest.raises(KVTierError, match=r"statuses|id|port|larger than max") as caught:
        await _found(peer)
    assert not caught.value.reason


async def test_releases_without_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that are not released end at their time."""
    monkeypatch.setattr(link, "_MAX_RELEASES", 3)
    peer = Peer(statuses=bytes([KeyStatus.MISS] * 2), prefix_hits=0)
    assert await _found(peer, searches=20) == set()
    assert peer.releases <= 3


async def test_a_search_that_is_interrupted_withdraws_its_lease() -> None:
    """The peer may have granted it, although no answer has arrived."""
    peer = Peer()
    async with _link_to(peer) as searching, asyncio.timeout(60):
        assert await _search(searching) is not None
        first, peer.hangs = await peer.grants.get(), True
        search = asyncio.create_task(_search(searching))
        second = await peer.grants.get()
        search.cancel()
        assert await peer.withdrawn.get() == [second]
        assert second != first
