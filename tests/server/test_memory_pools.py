"""Memory pools: the sizes that tenants get, and what a client can read in the memory it maps."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from harness.auth_site import PART, Site, make_site
from harness.payloads import assert_serves, correct_hits, key_of, payload
from harness.polling import wait_until
from harness.raw import connected_socket, hello_of
from harness.server_process import MIB
from harness.store_server import RunningKeeper

from kvtier.client import Client
from kvtier.protos.wire import socket_frames as frames
from kvtier.server.config.tenants import tenant_tag
from kvtier.server.memory_pools import with_pools
from kvtier.tiers.eviction.quotas import Tenant

UNIT = 2 * MIB


def tenant(name: str, **cpu: int) -> Tenant:
    quotas, limits = ({"cpu": cpu[key]} if key in cpu else {} for key in ("quota", "limit"))
    return Tenant(name, tenant_tag(name), quotas, limits)


class TestSizes:
    """A region of 64 MiB, so of 32 units."""

    @pytest.mark.parametrize(
        ("tenants", "sharing", "has_others", "expected"),
        [
            ([], "", True, {}),
            ([tenant("a", quota=9 * MIB)], "", False, {}),
            ([], "a", False, {"a": 31}),
            ([], "a", True, {"a": 15}),
            ([], "ba", False, {"a": 15, "b": 16}),
            ([], "ab", True, {"a": 10, "b": 10}),
            ([tenant("b", quota=9 * MIB)], "abc", False, {"b": 4, "a": 13, "c": 14}),
            ([tenant("b", quota=1)], "b", False, {"b": 1}),
            ([tenant("c", quota=40 * MIB)], "a", False, {"a": 6}),
            ([tenant("a", limit=5 * MIB)], "ab", False, {"a": 2, "b": 29}),
            ([tenant("a", quota=1 * MIB, limit=1 * MIB)], "a", False, {}),
            ([tenant("a", quota=64 * MIB)], "ab", True, {"a": 31}),
            ([tenant("a", quota=30 * MIB), tenant("b", quota=34 * MIB)], "abc", False, {"a": 15, "b": 16}),
        ],
    )
    def test_units_per_tenant(
        self,
        tenants: list[Tenant],
        sharing: str,
        has_others: bool,  # noqa: FBT001 - a parameter of the test
        expected: dict[str, int],
    ) -> None:
        found, layout = with_pools(tenants, set(sharing), 64 * MIB, has_others=has_others)
        own = {each.name: each.quotas["cpu"] for each in found if each.has_pool}
        assert {name: size / UNIT for name, size in own.items()} == expected
        assert set(own) <= set(sharing)
        assert {each.name for each in tenants} <= {each.name for each in found}
        edges = (*layout.pool_starts, 64 * MIB)
        sizes = [end - begin for begin, end in itertools.pairwise(edges[1:])]
        assert sizes == list(own.values())
        assert edges[0] == 0
        assert not any(edge % UNIT for edge in edges)
        assert edges[1] >= sum(each.quotas.get("cpu", 0) for each in found if not each.has_pool)

    def test_more_tenants_than_units(self) -> None:
        """The first ones get a unit each. Those without a pool cannot map memory."""
        names = [f"{number:03}" for number in range(100)]
        found, layout = with_pools([], names, 64 * MIB, has_others=False)
        assert [each.name for each in found if each.has_pool] == names[:31]
        assert len(layout.pool_starts) == 32

    def test_a_region_smaller_than_a_unit_has_no_pools(self) -> None:
        assert with_pools([], {"a"}, MIB, has_others=False)[1].pool_starts == (0,)

    def test_a_remainder_is_in_the_last_pool(self) -> None:
        _, layout = with_pools([], {"a"}, 9 * MIB, has_others=False)
        assert layout.pool_starts == (0, 2 * MIB)

    def test_clients_without_a_tenant(self) -> None:
        """Their figures are not those of the common pool."""
        found, _ = with_pools([], {""}, 64 * MIB, has_others=False)
        assert [(each.name, each.tag, each.has_pool) for each in found] == [("(unnamed)", tenant_tag(""), True)]

    def test_owners_differ(self) -> None:
        """Another tenant, order or size gives another layout; a quota below does not."""
        layouts = [
            with_pools(tenants, sharing, 64 * MIB, has_others=others)[1]
            for tenants, sharing, others in (
                ([], {"a"}, False),
                ([], {"a"}, True),
                ([], {"b"}, False),
                ([], {"a", "b"}, False),
                ([tenant("a", quota=20 * MIB)], {"a", "b"}, False),
                ([tenant("b", quota=20 * MIB)], {"a", "b"}, False),
            )
        ]
        assert len({layout.pool_owners for layout in layouts}) == len(layouts)


TENANTS = ("acme", "zeta", "far")
KEYS = {name: [key_of(number, salt=name) for number in range(40)] for name in TENANTS}
_WORDS = {int(word): name for name, keys in KEYS.items() for key in keys for word in payload(key, PART).view(np.uint64)}


def put(client: Client, keys: Sequence[bytes]) -> None:
    client.store(keys, [payload(key, PART) for key in keys])


def found_in(data: bytes) -> dict[str, int]:
    """Returns how many aligned words of each tenant's blocks are in these bytes."""
    words = np.frombuffer(data[: len(data) // 8 * 8], np.uint64)
    names, found = np.array(list(_WORDS), np.uint64), dict.fromkeys(TENANTS, 0)
    for word, count in zip(*np.unique(words[np.isin(words, names)], return_counts=True), strict=True):
        found[_WORDS[int(word)]] += int(count)
    return found


@contextlib.contextmanager
def mapped_by(site: Site, client: Client) -> Iterator[list[int]]:
    """The descriptors that a client's session gets for the region; none if it is refused."""
    ref = client._transport.session.ref
    with connected_socket(f"{site.server.path}.shm") as connection:
        connection.sendall(hello_of(ref, frames.Purpose.REGION))
        _, descriptors, _, _ = socket.recv_fds(connection, frames.REGION_ANSWER_BYTES, 64)
        try:
            yield descriptors
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def readable(site: Site, client: Client) -> dict[str, int]:
    """Returns how many words of each tenant a client finds in all memory that it can map.

    It reads the descriptor, maps it, and opens it again by its path in /proc.
    """
    found = dict.fromkeys(TENANTS, 0)
    with mapped_by(site, client) as descriptors:
        for descriptor in descriptors:
            size = os.fstat(descriptor).st_size
            with mmap.mmap(descriptor, size) as memory:
                seen = [found_in(bytes(memory)), found_in(os.pread(descriptor, 2 * size, 0))]
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
            seen.append(found_in(os.pread(again, 2 * size, 0)))
            os.close(again)
            assert seen == [seen[0]] * 3
            found = {name: found[name] + seen[0][name] for name in found}
    return found


ALL = len(KEYS["acme"]) * PART // 8


@pytest.fixture(params=["unix", "tokens"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A server of which the tenants acme and zeta can map memory, and far cannot."""
    made = make_site(tmp_path, region=32 * MIB, lmdb=0, auth="unix = true\n" if request.param == "tokens" else "")
    made.tokens.add("far-engine", "far", "engine")
    made.tokens.add("trusted", "*", "engine", shared_memory=True)
    try:
        made.server.start(backed=False)
        yield made
    finally:
        made.server.close()


@contextlib.contextmanager
def engines(site: Site, **options: str) -> Iterator[dict[str, Client]]:
    """An engine of each tenant, on the server's host."""
    with contextlib.ExitStack() as opened:
        clients = {name: opened.enter_context(site.client(f"{name}-engine", unix=True, **options)) for name in TENANTS}
        for client in clients.values():
            client.wait_until_connected(60)
        yield clients


class TestWhatAClientCanRead:
    @pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
    def test_only_blocks_of_its_tenant(self, site: Site, transport: str) -> None:
        """However the blocks came: each engine finds all of its own, and no other."""
        with engines(site, transport=transport) as stores, engines(site) as clients:
            assert [clients[name].transport == "shm" for name in TENANTS] == [True, True, False]
            for name, client in stores.items():
                put(client, KEYS[name])
            for name, client in clients.items():
                assert_serves(client, KEYS[name])
            nothing = dict.fromkeys(TENANTS, 0)
            assert readable(site, clients["acme"]) == nothing | {"acme": ALL}
            assert readable(site, clients["zeta"]) == nothing | {"zeta": ALL}
            assert readable(site, clients["far"]) == nothing

    def test_a_reader(self, site: Site) -> None:
        with engines(site) as clients, site.client("acme-reader", unix=True) as reader:
            for name, client in clients.items():
                put(client, KEYS[name])
            assert_serves(reader, KEYS["acme"])
            assert readable(site, reader) == {"acme": ALL, "zeta": 0, "far": 0}

    def test_a_caller_for_any_tenant(self, site: Site) -> None:
        """It maps the memory of the tenant that its session names, so far's is the common pool."""
        with engines(site) as clients:
            for name, client in clients.items():
                put(client, KEYS[name])
            for name in TENANTS:
                with site.client("trusted", unix=True, tenant=name) as trusted:
                    assert_serves(trusted, KEYS[name])
                    assert trusted.transport == "shm"
                    assert readable(site, trusted) == dict.fromkeys(TENANTS, 0) | {name: ALL}

    def test_after_many_evictions(self, site: Site) -> None:
        """A tenant that stores more than its memory evicts its own blocks only."""
        more = [key_of(number, salt="more") for number in range(3 * 32 * MIB // PART)]
        with engines(site) as clients:
            for name in ("acme", "far"):
                put(clients[name], KEYS[name])
            for start in range(0, len(more), 256):
                put(clients["zeta"], more[start : start + 256])
            put(clients["zeta"], KEYS["zeta"])
            for name in TENANTS:
                assert_serves(clients[name], KEYS[name])
            assert readable(site, clients["zeta"]) == {"acme": 0, "zeta": ALL, "far": 0}

    def test_what_it_writes_reaches_no_other_tenant(self, site: Site) -> None:
        """An engine overwrites all memory that it can map. Others still load their blocks."""
        with engines(site) as clients:
            for name, client in clients.items():
                put(client, KEYS[name])
            with mapped_by(site, clients["acme"]) as (descriptor,):
                size = os.fstat(descriptor).st_size
                with mmap.mmap(descriptor, size) as memory:
                    memory[:] = b"\x5a" * size
            for name in ("zeta", "far"):
                assert_serves(clients[name], KEYS[name])


def test_a_tenant_that_is_added_later_uses_streams(tmp_path: Path) -> None:
    """It has no memory of its own before the next start, so it must not map any."""
    site = make_site(tmp_path, region=32 * MIB, lmdb=0)
    try:
        site.server.start()
        site.tokens.add("far-engine", "far", "engine", shared_memory=True)
        wait_until(lambda: "tokens read again" in site.server.log)
        with site.client("acme-engine", unix=True) as acme:
            put(acme, KEYS["acme"])
            with site.client("far-engine", unix=True) as far:
                far.wait_until_connected(60)
                assert far.transport != "shm"
                put(far, KEYS["far"])
                assert_serves(far, KEYS["far"])
                assert readable(site, far) == dict.fromkeys(TENANTS, 0)
        site.server.restart()
        with site.client("far-engine", unix=True) as far:
            put(far, KEYS["far"])
            assert far.transport == "shm"
            assert readable(site, far)["far"] == ALL
    finally:
        site.server.close()


def test_pools_survive_a_warm_restart(tmp_path: Path) -> None:
    """Each tenant finds its blocks in its own memory. Other pools make the start cold."""
    with RunningKeeper(tmp_path) as keeper:
        site = make_site(tmp_path, region=32 * MIB, lmdb=0, config=f'keeper = "{keeper.path}"\n')
        site.tokens.add("far-engine", "far", "engine")
        try:
            site.server.start()
            with engines(site) as clients:
                for name, client in clients.items():
                    put(client, KEYS[name])
            site.server.kill()
            site.server.start()
            with engines(site) as clients:
                for name in TENANTS:
                    assert_serves(clients[name], KEYS[name])
                assert readable(site, clients["zeta"]) == {"acme": 0, "zeta": ALL, "far": 0}
                assert readable(site, clients["acme"]) == {"acme": ALL, "zeta": 0, "far": 0}
            site.server.kill()
            site.tokens.add("new-engine", "new", "engine", shared_memory=True)
            site.server.start()
            with engines(site) as clients:
                assert [correct_hits(clients[name], KEYS[name]) for name in TENANTS] == [0, 0, 0]
                wait_until(lambda: "other tenants had memory of their own" in site.server.log)
        finally:
            site.server.close()
