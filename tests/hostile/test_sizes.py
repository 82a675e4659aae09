"""Attacks with sizes and log lines: groups and ranks of a tenant, and refused peers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import grpc
import pytest
from harness.auth_site import Site
from harness.payloads import namespace_of
from harness.polling import wait_until
from harness.raw import RawSession, refusal_of
from harness.server_process import MIB, own_bytes

from kvtier.client.namespace import Namespace
from kvtier.protos.v1 import cache_pb2, common_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import Purpose, pack_hello

PAGE = 4096
BLOCKS = 4096
GROWTH = 48 * MIB
"""Memory that an attack may cost. The region has 16 MiB; 4,096 lists of 4,096 slots take 128."""
CONNECTIONS = 3000
LINES = 200
"""Log lines of an attack: 100 of a kind at once, one per 10 s, of two kinds at most."""


def namespace(*part_bytes: int, world_size: int = 1) -> Namespace:
    return namespace_of(*part_bytes, world_size=world_size, tenant="acme")


@contextlib.contextmanager
def attacker(site: Site, space: Namespace, rank: int | None = None) -> Iterator[RawSession]:
    credentials = site.credentials("acme-far")
    with RawSession(site.server.tcp, space, engine_id="attacker", rank=rank, credentials=credentials) as session:
        yield session


def keys_of(groups: range, salt: int = 0) -> list[bytes]:
    return [b"%028d" % salt + group.to_bytes(4, "big") for group in groups]


@pytest.mark.parametrize("space", [namespace(*[PAGE] * 257), namespace(PAGE, world_size=1025)])
def test_more_groups_and_ranks_than_engines_have_are_refused(site: Site, space: Namespace) -> None:
    with pytest.raises(grpc.RpcError) as refused, attacker(site, space):
        pass
    assert refusal_of(refused.value)[1] == "INVALID_NAMESPACE"


@pytest.mark.parametrize("ranks", [4096, 1024])
def test_lists_of_slots_are_small_beside_the_slots(site: Site, ranks: int) -> None:
    """One rank of very many stores one byte of each block, and so gets few blocks."""
    before = own_bytes(site.server.pid)
    with contextlib.suppress(grpc.RpcError), attacker(site, namespace(1, world_size=ranks), rank=0) as session:
        keys = [key for salt in range(BLOCKS) for key in keys_of(range(1), salt)]
        request = cache_pb2.PrepareStoreRequest(session=session.ref, keys=pack_keys(keys))
        granted = session.cache.PrepareStore(request, timeout=60).statuses.count(common_pb2.STORE_STATUS_GRANTED)
        assert granted <= 256, "a slot of a block with 1,024 ranks has 64 KiB at least"
        assert own_bytes(site.server.pid) < before + GROWTH


@pytest.mark.parametrize("hello", [b"garbage!" * 8, pack_hello(Purpose.REGION, bytes(16), 1, 0)[:5]])
def test_refused_peers_write_few_lines(site: Site, hello: bytes) -> None:
    """A peer without credentials opens connections to the Unix socket and sends no hello."""
    before = len(site.server.log.splitlines())
    for _ in range(CONNECTIONS):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            connection.connect(f"{site.server.path}.shm")
            connection.sendall(hello)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(64)
    wait_until(lambda: site.server.status() is not None)
    assert len(site.server.log.splitlines()) - before < LINES
