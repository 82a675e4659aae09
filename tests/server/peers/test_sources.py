"""Blocks from another server: real servers on the loopback, one of which names the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.bulk import kill_bulk, wait_for_bulk
from harness.http_get import get
from harness.payloads import assert_serves, is_payload, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.ports import ReservedPort
from harness.server_process import MIB, ServerProcess, bulk_pid
from harness.service_calls import PART as CALLS_PART
from harness.service_calls import Calls, no_sources, serving, until
from harness.shared_tier import SharedDirectory

from kvtier.client import Client, SourceOutcome, TierFilter
from kvtier.protos.credentials import Credentials
from kvtier.protos.peer_directory import PeerDirectory
from kvtier.protos.v1 import cache_pb2, common_pb2
from kvtier.server.peers import sources
from kvtier.server.peers.link import PeerLease
from kvtier.server.peers.peer_tier import PeerTier
from kvtier.tiers import secondary_tier
from kvtier.tiers.remote.circuit_breaker import CircuitBreaker
from kvtier.tiers.types import tenant_of

PART = 16 << 10
PATIENT = 'deadline = "5s"'
KEYS = [key_of(number) for number in range(40)]
EVERYWHERE = secondary_tier.TierFilter()


@contextlib.contextmanager
def _here(directory: Path, *servers: str, more: str = PATIENT) -> Iterator[ServerProcess]:
    """A server at which these servers may be named."""
    directory.mkdir(exist_ok=True)
    listed = ", ".join(f'"{server}"' for server in servers)
    with ServerProcess(directory, config=f"insecure = true\n[peers]\nservers = [{listed}]\n{more}").start() as server:
        yield server


def _client(server: ServerProcess, model: str, **more: Any) -> Client:
    client = Client(server.endpoint, namespace=namespace_of(PART, model=model, **more))
    client.wait_until_connected(60)
    return client


def _start_bulk(server: ServerProcess) -> None:
    """Starts the bulk process, which takes longer than a search may on a busy machine."""
    with Client(server.tcp, namespace=namespace_of(PART, model="bulk"), transport="tcp") as client:
        client.wait_until_connected(60)
        wait_for_bulk(client)


def _store(client: Client, keys: list[bytes]) -> None:
    client.store(keys, [payload(key, PART) for key in keys])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server that has the blocks."""
    with ServerProcess(tmp_path_factory.mktemp("b"), tcp=True).start() as server:
        _start_bulk(server)
        yield server


@pytest.fixture(scope="module")
def metrics_port() -> Iterator[int]:
    with ReservedPort() as port:
        yield port.number


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, source: ServerProcess, metrics_port: int) -> Iterator[ServerProcess]:
    """The server that loads them. It knows the source by a name of DNS."""
    port = source.tcp.rpartition(":")[2]
    config = (
        f'metrics = "127.0.0.1:{metrics_port}"\ninsecure = true\n[peers]\nservers = ["localhost:{port}"]\n{PATIENT}'
    )
    with ServerProcess(tmp_path_factory.mktemp("a"), config=config).start() as server, _client(server, "dns") as client:

        def is_resolved() -> bool:
            with client.lookup(KEYS, source=source.tcp) as lease:
                return lease.source_outcome is not SourceOutcome.NOT_LISTED

        wait_until(is_resolved)
        yield server


def test_a_server_with_peers_is_ready_for_their_first_search(tmp_path: Path) -> None:
    """A first lookup of 0.2 s missed, because the source started its bulk process for it."""
    config = '[peers]\nservers = ["127.0.0.1:1"]\n'
    with ServerProcess(tmp_path, tcp=True, config=config).start() as server:
        wait_until(lambda: bulk_pid(server.pid))


def _count(port: int, name: str, labels: str) -> float:
    lines = get(port, "/metrics")[2].splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"kvtier_{name}{{{labels}}}"))


def test_blocks_of_a_source_come_into_the_cpu_tier(here: ServerProcess, source: ServerProcess) -> None:
    """Only the missing blocks. The next lookup finds them here, and the source keeps no lease."""
    with _client(source, "pulled") as there, _client(here, "pulled") as client:
        _store(there, KEYS)
        _store(client, KEYS[:10])
        with client.lookup([*KEYS, key_of(1000)], wait=30, source=source.tcp) as lease:
            assert lease.source_outcome is SourceOutcome.FOUND
            assert lease.prefix_hits == len(KEYS)
            assert lease.sources[:40] == (*["cpu"] * 10, *["peers"] * 30)
        assert_serves(client, KEYS)
        with client.lookup(KEYS, source=source.tcp, wait=5) as lease:
            assert (lease.prefix_hits, lease.source_outcome) == (len(KEYS), SourceOutcome.NOT_NEEDED)
            assert set(lease.source_indices) == {0}
        wait_until(lambda: there.status().leases == 0)


def test_blocks_that_are_stored_here_are_not_sent_to_the_source(here: ServerProcess, source: ServerProcess) -> None:
    """A flush completes without this tier."""
    with _client(source, "one way") as there, _client(here, "one way") as client:
        _store(client, KEYS)
        client.flush(KEYS, wait=60)
        with there.lookup(KEYS) as lease:
            assert lease.prefix_hits == 0
        assert here.tier("peers").used_bytes == 0


def test_begin_request_and_prefetch_name_a_source(here: ServerProcess, source: ServerProcess) -> None:
    with _client(source, "calls") as there, _client(here, "calls") as client:
        _store(there, KEYS)
        found = client.begin_request("r", KEYS[:5], wait=30, source=source.tcp)
        assert (found.prefix_hits, found.source_outcome) == (5, SourceOutcome.FOUND)
        client.finish_request("r")
        prefetched = client.prefetch([*KEYS, key_of(1000)], wait=30, source=source.tcp)
        assert (prefetched.present, prefetched.started, prefetched.missing) == (5, 35, 1)
        assert prefetched.source_outcome is SourceOutcome.FOUND
        wait_until(lambda: client.prefetch(KEYS).present == 40)
        assert_serves(client, KEYS)


def test_each_key_can_be_searched_independently(here: ServerProcess, source: ServerProcess) -> None:
    with _client(source, "each") as there, _client(here, "each") as client:
        _store(there, KEYS[1::2])
        with client.lookup(KEYS, wait=30, prefix=False, source=source.tcp) as lease:
            assert [index for index, status in enumerate(lease.statuses) if status == 1] == list(range(1, 40, 2))


def test_all_ranks_are_pulled(here: ServerProcess, source: ServerProcess) -> None:
    """A scheduler names the source, and each rank reads its own parts here."""
    namespace = namespace_of(PART, model="ranks", world_size=2)
    with contextlib.ExitStack() as opened:
        ranks = {
            (server, rank): opened.enter_context(Client(server.endpoint, namespace=namespace, rank=rank))
            for server in (source, here)
            for rank in (0, 1)
        }
        for rank in (0, 1):
            ranks[source, rank].store(KEYS, [payload(key, PART, rank) for key in KEYS])
        scheduler = opened.enter_context(Client(here.endpoint, namespace=namespace))
        with scheduler.lookup(KEYS, wait=30, source=source.tcp) as lease:
            assert lease.prefix_hits == len(KEYS)
        for rank in (0, 1):
            buffers = [bytearray(PART) for _ in KEYS]
            assert ranks[here, rank].load(KEYS, buffers) == len(KEYS)
            assert buffers == [bytes(payload(key, PART, rank)) for key in KEYS]


def test_calls_for_the_same_blocks_share_one_load(
    here: ServerProcess, source: ServerProcess, metrics_port: int
) -> None:
    labels = 'operation="load",outcome="done",tier="peers"'
    with _client(source, "shared") as there, _client(here, "shared") as client, ThreadPoolExecutor(4) as threads:
        _store(there, KEYS)
        before = _count(metrics_port, "tier_job_blocks_total", labels)
        found = list(threads.map(lambda _: client.lookup(KEYS, wait=30, source=source.tcp), range(4)))
        assert [lease.prefix_hits for lease in found] == [len(KEYS)] * 4
        wait_until(lambda: _count(metrics_port, "tier_job_blocks_total", labels) - before == len(KEYS))
        assert [lease.source_outcome for lease in found].count(SourceOutcome.FOUND) == 1
        for lease in found:
            lease.release()


def test_searches_at_the_same_time_share_the_sessions(tmp_path: Path, source: ServerProcess) -> None:
    """All are answered, and none counts as a failure of the source."""
    with (
        _here(tmp_path, source.tcp) as here,
        _client(source, "same time") as there,
        _client(here, "same time") as client,
        ThreadPoolExecutor(8) as threads,
    ):
        _store(there, KEYS)
        found = list(threads.map(lambda n: client.lookup(KEYS[5 * n :][:5], wait=30, source=source.tcp), range(8)))
        assert [(lease.source_outcome, lease.prefix_hits) for lease in found] == [(SourceOutcome.FOUND, 5)] * 8
        assert [session.model for session in there.status().sessions].count("same time") == 2
        for lease in found:
            lease.release()


def test_a_tenant_gets_no_blocks_of_another_tenant(here: ServerProcess, source: ServerProcess) -> None:
    """The same holds for any other difference of the namespaces."""
    with (
        _client(source, "tenants", tenant="acme") as there,
        _client(here, "tenants", tenant="zeta") as zeta,
        _client(here, "other", tenant="acme") as other,
        _client(here, "tenants", tenant="acme") as acme,
    ):
        _store(there, KEYS)
        for client, outcome, hits in (
            (zeta, SourceOutcome.ABSENT, 0),
            (other, SourceOutcome.ABSENT, 0),
            (acme, SourceOutcome.FOUND, 40),
        ):
            with client.lookup(KEYS, wait=30, source=source.tcp) as lease:
                assert (lease.source_outcome, lease.prefix_hits) == (outcome, hits)


def test_only_listed_servers_are_asked(here: ServerProcess, metrics_port: int) -> None:
    """Nothing connects to another address; its name is only compared. The metric counts it."""
    before = _count(metrics_port, "source_searches_total", 'outcome="not_listed"')
    with _client(here, "listed") as client, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        for name in (f"127.0.0.1:{listener.getsockname()[1]}", "unix:/tmp/s", "nonsense", "no.such.name.:7450"):
            with client.lookup(KEYS, wait=5, source=name) as lease:
                assert (lease.source_outcome, lease.prefix_hits) == (SourceOutcome.NOT_LISTED, 0)
        with pytest.raises(TimeoutError):
            listener.accept()
    wait_until(lambda: _count(metrics_port, "source_searches_total", 'outcome="not_listed"') - before == 4)


def test_a_server_without_peers_asks_no_server(source: ServerProcess) -> None:
    with _client(source, "none") as client, client.lookup(KEYS, wait=5, source=source.tcp) as lease:
        assert lease.source_outcome is SourceOutcome.NOT_LISTED


def test_a_lookup_can_exclude_other_hosts(here: ServerProcess, source: ServerProcess) -> None:
    with _client(source, "excluded") as there, _client(here, "excluded") as client:
        _store(there, KEYS)
        for exclude in (TierFilter(remote=True), TierFilter(names=["peers"])):
            with client.lookup(KEYS, wait=5, source=source.tcp, exclude=exclude) as lease:
                assert (lease.source_outcome, lease.prefix_hits) == (SourceOutcome.NONE, 0)


def test_a_lookup_that_finds_too_little_loads_nothing(here: ServerProcess, source: ServerProcess) -> None:
    """The source keeps no lease for such a lookup."""
    with _client(source, "least") as there, _client(here, "least") as client:
        _store(there, KEYS[:3])
        with client.lookup(KEYS, wait=5, source=source.tcp, min_hits=5) as lease:
            assert (lease.source_outcome, lease.prefix_hits) == (SourceOutcome.FOUND, 0)
        wait_until(lambda: there.status().leases == 0)


def test_bytes_in_flight_are_bounded(tmp_path: Path, source: ServerProcess) -> None:
    """Of the blocks beyond a half of it none is asked for. The next lookup gets further ones."""
    keys = [key_of(number, salt="flight") for number in range(60)]
    with (
        _here(tmp_path / "a", source.tcp, more=f'{PATIENT}\nin_flight = "1MiB"') as here,
        _client(source, "bounded") as there,
        _client(here, "bounded") as client,
    ):
        _store(there, keys)
        with client.lookup(keys, wait=30, source=source.tcp) as lease:
            assert lease.prefix_hits == 32
        with client.lookup(keys, wait=30, source=source.tcp) as lease:
            assert lease.prefix_hits == 60


def test_a_server_that_hangs_costs_the_deadline(tmp_path: Path) -> None:
    """It accepts connections and never answers. After two failures it is not asked for a time."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        _here(tmp_path, "127.0.0.1:{}".format(*listener.getsockname()[1:]), more='deadline = "200ms"') as here,
        _client(here, "hung") as client,
    ):
        name = f"127.0.0.1:{listener.getsockname()[1]}"
        for _ in range(4):
            with client.lookup(KEYS, wait=60, source=name) as lease:
                assert (lease.source_outcome, lease.prefix_hits) == (SourceOutcome.UNREACHABLE, 0)
        _store(client, KEYS)
        assert_serves(client, KEYS)


@pytest.mark.slow
def test_a_source_that_stalls_during_a_load_is_a_miss(tmp_path: Path, source: ServerProcess) -> None:
    """A load ends after a second without a byte. When the source goes on, it is found again."""
    with (
        _here(tmp_path / "a", source.tcp) as here,
        _client(source, "stalled") as there,
        _client(here, "stalled") as client,
    ):
        _store(there, KEYS)
        pid = kill_bulk(source, signal.SIGSTOP)
        try:
            with client.lookup(KEYS, wait=60, source=source.tcp) as lease:
                assert (lease.source_outcome, lease.prefix_hits) == (SourceOutcome.FOUND, 0)
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: there.status().leases == 0)

        def is_found() -> bool:
            with client.lookup(KEYS, wait=30, source=source.tcp) as lease:
                return bool(lease.prefix_hits == len(KEYS))

        wait_until(is_found)


def test_a_source_killed_during_a_load_is_a_miss(tmp_path: Path) -> None:
    """Its bulk process is stopped, so that the load has begun and waits. Then the host dies."""
    (tmp_path / "b").mkdir()
    with (
        ServerProcess(tmp_path / "b", tcp=True).start() as source,
        _here(tmp_path / "a", source.tcp, more=PATIENT) as here,
        _client(source, "killed") as there,
        _client(here, "killed") as client,
        ThreadPoolExecutor(1) as threads,
    ):
        _store(there, KEYS)
        _start_bulk(source)
        kill_bulk(source, signal.SIGSTOP)
        found = threads.submit(lambda: client.lookup(KEYS, wait=60, source=source.tcp))
        wait_until(lambda: here.tier("peers").jobs > 0)
        source.kill()
        with found.result(60) as lease:
            assert (lease.source_outcome, lease.prefix_hits) == (SourceOutcome.FOUND, 0)
        assert here.tier("peers").jobs == 0
        _store(client, KEYS)
        assert_serves(client, KEYS)


def test_a_restarted_source_is_found_again(tmp_path: Path) -> None:
    """The sessions of its earlier process are replaced."""
    (tmp_path / "b").mkdir()
    with (
        ServerProcess(tmp_path / "b", tcp=True).start() as source,
        _here(tmp_path / "a", source.tcp) as here,
        _client(here, "restarted") as client,
    ):
        for number in (0, 1):
            keys = KEYS[20 * number :][:20]
            with _client(source, "restarted") as there:
                _store(there, keys)

                def is_found(keys: list[bytes] = keys) -> bool:
                    with client.lookup(keys, wait=30, source=source.tcp) as lease:
                        return bool(lease.prefix_hits == 20)

                wait_until(is_found)
            if not number:
                source.restart()


def test_a_full_cpu_tier_takes_what_fits(tmp_path: Path, source: ServerProcess) -> None:
    """Pinned blocks leave no room. The lookup gets the leading blocks, and nothing stays leased."""
    directory = tmp_path / "a"
    directory.mkdir()
    keys = [key_of(number, salt="full") for number in range(200)]
    config = f'insecure = true\n[peers]\nservers = ["{source.tcp}"]\n{PATIENT}'
    with (
        ServerProcess(directory, config=config, region=2 * MIB).start() as here,
        _client(source, "full") as there,
        _client(here, "full") as client,
    ):
        _store(there, keys)
        with client.lookup(keys, wait=30, source=source.tcp) as lease:
            assert 0 < lease.prefix_hits < 200
        wait_until(lambda: there.status().leases == 0)


def test_the_event_loop_answers_during_a_search(tmp_path: Path) -> None:
    """Other calls do not wait for a source that hangs."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        _here(tmp_path, f"127.0.0.1:{listener.getsockname()[1]}", more=PATIENT) as here,
        _client(here, "busy") as client,
        _client(here, "busy") as other,
    ):
        ended = threading.Event()

        def search() -> None:
            client.lookup(KEYS, wait=60, source=f"127.0.0.1:{listener.getsockname()[1]}")
            ended.set()

        thread = threading.Thread(target=search)
        thread.start()
        sock, _ = listener.accept()  # the search has begun
        _store(other, KEYS)
        assert_serves(other, KEYS)
        assert not ended.is_set()
        sock.close()
        thread.join()


class FakeLink:
    """Another server that has all blocks, and answers when `searches` searches wait for it."""

    name = "fake"

    def __init__(self, searches: int) -> None:
        self._all_wait = asyncio.Barrier(searches)
        self.released: list[PeerLease] = []

    async def search(self, _: object, __: object, keys: Sequence[bytes], **___: object) -> PeerLease:
        await self._all_wait.wait()
        link: Any = self
        return PeerLease(link, link, 1, {key: item for item, key in enumerate(keys)})

    def release(self, lease: PeerLease) -> None:
        self.released.append(lease)

    def end_idle_sessions(self, _: float) -> bool:
        return True

    async def close(self) -> None: ...


async def _search_at_once(
    monkeypatch: pytest.MonkeyPatch, link: FakeLink, wanted: Sequence[list[bytes]], in_flight_bytes: int
) -> list[sources.Located]:
    """Returns the results of searches that run at the same time."""
    monkeypatch.setattr(sources, "PeerLink", lambda *_: link)
    directory = PeerDirectory(["127.0.0.1:1"])
    tier = PeerTier(20.0, in_flight_bytes)
    async with serving(tier) as calls:
        searches = _searches_of(calls, tier, directory)
        until = calls.runtime.now() + 20
        return await asyncio.gather(
            *(searches.locate(calls.session, "127.0.0.1:1", keys, EVERYWHERE, until, prefix=True) for keys in wanted)
        )


async def test_a_search_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow source has as much time for each of them."""
    wanted = [KEYS[:10], KEYS[10:20], KEYS[20:30], KEYS[30:]]
    located = await _search_at_once(monkeypatch, FakeLink(4), wanted, MIB)
    assert [(each.outcome, each.keys) for each in located] == [
        (cache_pb2.SOURCE_OUTCOME_FOUND, keys) for keys in wanted
    ]


async def test_searches_at_the_same_time_locate_each_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later one locates the other blocks. If there are none, it gives up its lease."""
    located = await _search_at_once(monkeypatch, FakeLink(2), [KEYS[:20], KEYS[10:30]], MIB)
    assert sorted(key for each in located for key in each.keys) == sorted(KEYS[:30])
    link = FakeLink(2)
    located = await _search_at_once(monkeypatch, link, [KEYS[:20], KEYS[:20]], MIB)
    assert sorted((each.outcome, len(each.keys)) for each in located) == [
        (cache_pb2.SOURCE_OUTCOME_FOUND, 20),
        (cache_pb2.SOURCE_OUTCOME_NOT_NEEDED, 0),
    ]
    assert len(link.released) == 1


async def test_searches_at_the_same_time_share_the_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing of the bound is left, a search gives up its lease."""
    link = FakeLink(3)
    located = await _search_at_once(monkeypatch, link, [KEYS[:10], KEYS[10:20], KEYS[20:30]], 30 * CALLS_PART)
    assert sorted(len(each.keys) for each in located) == [0, 5, 10]
    assert cache_pb2.SOURCE_OUTCOME_BUSY in [each.outcome for each in located]
    assert len(link.released) == 1


async def test_a_search_has_a_bound_and_is_charged_to_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a source was processed in one piece of up to 0.4 s, which no account paid."""
    monkeypatch.setattr(sources, "_MAX_BLOCKS", 10)
    monkeypatch.setattr(sources, "PeerLink", lambda *_: FakeLink(1))
    tier = PeerTier(20.0, MIB)
    async with serving(tier) as calls:
        calls.registry.tenant_of = lambda _: "acme"
        searches = _searches_of(calls, tier, PeerDirectory(["127.0.0.1:1"]))
        account = calls.long_calls.scheduler.account_of(calls.session.id)
        assert account is not None
        before, until = account.used, calls.runtime.now() + 20
        located = await searches.locate(calls.session, "127.0.0.1:1", KEYS, EVERYWHERE, until, prefix=True)
        assert located.keys == KEYS[:10]
        assert account.used > before


async def test_a_tenant_leaves_room_in_flight_for_others() -> None:
    """It gets at most as much as is then free, and others get what it leaves."""
    link: Any = FakeLink(1)
    tier = PeerTier(20.0, 16 * CALLS_PART)
    alice, bob = secondary_tier.NamespaceId(b"a" * 32), secondary_tier.NamespaceId(b"b" * 32)
    sizes = [CALLS_PART] * 16

    def locate(namespace: secondary_tier.NamespaceId) -> int:
        found = tier.affordable(namespace, sizes)
        items = {key: item for item, key in enumerate(KEYS[:found])}
        tier.locate(PeerLease(link, link, 1, items), namespace, lambda _: CALLS_PART, CircuitBreaker())
        return found

    assert [locate(alice), tier.affordable(alice, sizes), locate(bob)] == [8, 0, 4]
    tier.abandon((alice, key) for key in KEYS)
    tier.abandon((bob, key) for key in KEYS)
    assert (tier.affordable(alice, sizes), dict(tier._bytes_of_tenant)) == (8, {})


@pytest.mark.parametrize("how", ["short", "cancelled", "short while open", "whole"])
async def test_calls_that_end_early_do_not_open_the_circuit_breaker(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A tenant must not make a source unreachable for others. Nor may it use up the probes."""
    link = FakeLink(1000)  # never answers
    monkeypatch.setattr(sources, "PeerLink", lambda *_: link)
    tier = PeerTier(60.0, MIB)
    async with serving(tier) as calls:
        directory = PeerDirectory(["127.0.0.1:1"])
        searches, address = _searches_of(calls, tier, directory), directory.find("127.0.0.1:1")
        assert address is not None
        breaker = searches._breakers[address, tenant_of(calls.session.namespace.id)]
        if how == "whole":
            searches._deadline_seconds = 0.01
        if how == "short while open":
            now = 0.0
            breaker._clock = lambda: now
            breaker.failed("")
            breaker.failed("")
            now = 100.0
        for _ in range(4):
            seconds = 60.0 if how in ("cancelled", "whole") else 0.01
            search = searches.locate(
                calls.session, "127.0.0.1:1", KEYS, EVERYWHERE, calls.runtime.now() + seconds, prefix=True
            )
            if how == "cancelled":
                task = asyncio.create_task(search)
                await until(lambda: link._all_wait.n_waiting > 0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await until(lambda: not link._all_wait.n_waiting)
            else:
                assert (await search).outcome == cache_pb2.SOURCE_OUTCOME_UNREACHABLE
        assert breaker.is_open == (how in ("short while open", "whole"))
        assert breaker.permits() == (how != "whole")


async def test_the_circuit_breaker_of_a_vanished_address_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name stands for other addresses than before, as after each restart of a pod."""
    monkeypatch.setattr(sources, "_SWEEP_SECONDS", 0.01)
    addresses = ["127.0.0.1"]
    directory = PeerDirectory(["peers.example:1"], resolve_name=lambda _: addresses)
    tier = PeerTier(60.0, MIB)
    async with serving(tier) as calls:
        searches = _searches_of(calls, tier, directory)
        for address in ("127.0.0.1", "127.0.0.2") * 2:  # two failures, which open the breaker
            addresses[:] = ["127.0.0.2", address]
            directory.refresh()
            located = await searches.locate(
                calls.session, f"{address}:1", KEYS, EVERYWHERE, calls.runtime.now() + 60, prefix=True
            )
            assert located.outcome == cache_pb2.SOURCE_OUTCOME_UNREACHABLE
        assert {address.host for address, _ in searches._breakers} == {"127.0.0.1", "127.0.0.2"}
        sweeps = asyncio.create_task(searches.sweep())
        await until(lambda: {address.host for address, _ in searches._breakers} == {"127.0.0.2"})
        sweeps.cancel()
        await searches.close()


async def test_the_circuit_breaker_of_an_address_with_two_names_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The breaker belongs to the second name. A search for the address finds the first name."""
    monkeypatch.setattr(sources, "_SWEEP_SECONDS", 0.01)
    addresses = {"first.example": "127.0.0.1", "second.example": "127.0.0.1", "third.example": "127.0.0.2"}
    directory = PeerDirectory([f"{name}:1" for name in addresses], resolve_name=lambda name: [addresses[name]])
    directory.refresh()
    tier = PeerTier(60.0, MIB)
    async with serving(tier) as calls:
        searches = _searches_of(calls, tier, directory)
        for name in ("second.example", "third.example") * 2:
            located = await searches.locate(
                calls.session, f"{name}:1", KEYS, EVERYWHERE, calls.runtime.now() + 60, prefix=True
            )
            assert located.outcome == cache_pb2.SOURCE_OUTCOME_UNREACHABLE
        addresses["third.example"] = "127.0.0.3"
        directory.refresh()
        sweeps = asyncio.create_task(searches.sweep())
        await until(lambda: "third.example" not in {address.tls_name for address, _ in searches._breakers})
        assert [address.tls_name for address, _ in searches._breakers] == ["second.example"]
        sweeps.cancel()
        await searches.close()


def _searches_of(calls: Calls, tier: PeerTier, directory: PeerDirectory) -> sources.PeerSources:
    return sources.PeerSources(
        tier,
        calls.runtime,
        directory,
        Credentials(),
        60.0,
        scheduler=calls.long_calls.scheduler,
        description_of=lambda _: common_pb2.Namespace(world_size=1),
    )


async def test_a_search_queries_shared_tiers_meanwhile(tmp_path: Path) -> None:
    """The tiers of this server answer during the search, and not only after it."""
    async with serving(SharedDirectory("far", tmp_path, 1 << 20, durability="process")) as calls:
        searching = no_sources(calls.runtime, calls.long_calls)
        assert searching._lacking(calls.session, KEYS, EVERYWHERE) == KEYS
        assert calls.runtime.core.take_commands() == []
        await until(lambda: not calls.runtime.core._tier_jobs.residency._queries)


def test_a_block_that_is_damaged_in_the_memory_of_the_source(tmp_path: Path, source: ServerProcess) -> None:
    """It is not loaded, the others are, and the source removes it."""
    with contextlib.ExitStack() as opened:
        here = opened.enter_context(_here(tmp_path / "c", source.tcp))
        namespace = namespace_of(PART, model="damaged", world_size=2)
        there, near = (
            [opened.enter_context(Client(end, namespace=namespace, rank=rank, verify="always")) for rank in range(2)]
            for end in (source.endpoint, here.endpoint)
        )
        for client in (*there, *near):
            client.wait_until_connected(60)
        for rank, client in enumerate(there):
            client.store(KEYS[:8], [payload(key, PART, rank) for key in KEYS[:8]])
        with there[1].lookup(KEYS[:8], slots=True) as lease:
            assert lease.slots is not None
            [slot] = struct.unpack("<Q", lease.slots.offsets[8 * 5 : 8 * 6])
            there[1]._transport.session.region.memory[slot] ^= 1
        with near[0].lookup(KEYS[:8], wait=30, source=source.tcp, prefix=False) as lease:
            assert [number for number, status in enumerate(lease.statuses) if status != 1] == [5]
        wait_until(lambda: there[0].lookup(KEYS[:8]).prefix_hits == 5)
        for rank, client in enumerate(near):
            buffers = [np.empty(PART, np.uint8) for _ in range(5)]
            assert client.load(KEYS[:5], buffers) == 5
            assert all(is_payload(key, found, rank) for key, found in zip(KEYS, buffers, strict=False))
