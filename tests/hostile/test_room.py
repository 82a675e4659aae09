"""Room in the CPU tier: leases and waiting lookups of a tenant do not keep out another tenant.

The attacker "acme" pins all that it may, waits with many lookups, and withdraws grants in masses.
The victim "zeta" has a prefix on the disk, and looks it up with `wait`. It stores blocks of another
size, too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from harness.auth_site import Site, make_site
from harness.payloads import filled, is_payload, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.raw import RawSession
from harness.server_process import MIB

from kvtier.client import Client, KeyStatus, KVTierError, StoreStatus, Timeouts
from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys

PART = 64 << 10
REGION = 16 * MIB
BLOCKS = REGION // PART
VICTIMS = [key_of(number, salt="victim") for number in range(BLOCKS // 8)]
ATTACKERS = [key_of(number, salt="attacker") for number in range(BLOCKS)]
WAIT = 20.0
TIMEOUT = 60.0
SALTS = itertools.count()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = make_site(tmp_path_factory.mktemp("t"), region=REGION, lmdb=128 * MIB, shared_memory=False)
    with made.server.start():
        with _client(made, "zeta-engine") as victim, _client(made, "acme-far") as attacker:
            _put_on_disk(victim, VICTIMS)
            _put_on_disk(attacker, ATTACKERS)
        yield made
        assert made.server.alive
        assert '"call failed"' not in made.server.log, "a defect, answered with INTERNAL"


def _client(site: Site, holder: str, part: int = PART) -> Client:
    tenant = holder.partition("-")[0]
    timeouts = Timeouts(connect=TIMEOUT, call=TIMEOUT, transfer=TIMEOUT)
    return Client(
        site.server.tcp,
        namespace=namespace_of(part, tenant=tenant),
        credentials=site.credentials(holder),
        timeouts=timeouts,
    )


def _put_on_disk(client: Client, keys: list[bytes]) -> None:
    for start in range(0, len(keys), 16):
        batch = keys[start : start + 16]
        while StoreStatus.NO_ROOM in client.store(batch, [payload(key, PART) for key in batch]):
            client.flush(batch)
        client.flush(batch, wait=30)


def _is_served(client: Client) -> None:
    """The victim's whole prefix is read within its wait, bit by bit."""
    buffers = filled(len(VICTIMS), PART)
    assert client.load(VICTIMS, buffers, wait=WAIT) == len(VICTIMS)
    assert all(is_payload(key, found) for key, found in zip(VICTIMS, buffers, strict=True))


@dataclass
class Flood:
    """Lookups of the attacker, which wait, on threads of their own."""

    client: Client
    threads: ThreadPoolExecutor

    def begin(self, count: int) -> list[Future[object]]:
        """Lookups with distinct starts, so that each needs other blocks."""
        return [
            self.threads.submit(lambda start: self.client.lookup(ATTACKERS[start:], wait=WAIT, lease=WAIT), number)
            for number in range(count)
        ]


def test_pinned_blocks(site: Site) -> None:
    """The attacker leases its blocks again and again; the victim finds room without a wait."""
    with _client(site, "acme-far") as attacker, _client(site, "zeta-engine") as victim:
        leases = [attacker.lookup(ATTACKERS, lease=600, prefix=False) for _ in range(20)]
        assert sum(status == 1 for status in leases[-1].statuses) < BLOCKS
        _is_served(victim)


def test_open_stores(site: Site) -> None:
    """The attacker begins stores on all slots and completes none; the victim loads and stores."""
    namespace = namespace_of(PART, tenant="acme")
    raw = RawSession(site.server.tcp, namespace, engine_id="hoarder", credentials=site.credentials("acme-far"))
    try:
        for start in range(0, 2 * BLOCKS, BLOCKS // 4):
            keys = [key_of(number, salt="open") for number in range(start, start + BLOCKS // 4)]
            request = cache_pb2.PrepareStoreRequest(session=raw.ref, keys=pack_keys(keys))
            raw.cache.PrepareStore(request, timeout=TIMEOUT)
        assert site.server.status().stores > 0
        with _client(site, "zeta-engine") as victim:
            keys = [key_of(next(SALTS), salt="fresh") for _ in range(8)]
            assert StoreStatus.NO_ROOM not in victim.store(keys, [payload(key, PART) for key in keys])
            _is_served(victim)
    finally:
        raw.end()


def test_many_waiting_lookups(site: Site) -> None:
    """Forty lookups of the attacker wait for room when the victim's arrives."""
    with (
        _client(site, "acme-far") as attacker,
        _client(site, "zeta-engine") as victim,
        ThreadPoolExecutor(40) as threads,
    ):
        attacker.wait_until_connected(TIMEOUT)
        flood = Flood(attacker, threads).begin(40)
        site.server.wait_for(lambda status: status.leases > 0)
        for _ in range(3):
            _is_served(victim)
        assert any(not future.done() for future in flood), "the attacker's lookups wait"
        attacker.close()
        for future in flood:
            with contextlib.suppress(Exception):
                future.result(TIMEOUT)
    site.server.wait_for(lambda status: status.leases == 0)


def test_a_waiting_lookup_keeps_out_no_lookup_without_a_wait(site: Site) -> None:
    """The attacker has leased its part, and another lookup waits; the victim loads its blocks."""
    fresh = [[key_of(next(SALTS), salt="hasty") for _ in range(8)] for _ in range(2)]
    with (
        _client(site, "acme-far") as attacker,
        _client(site, "zeta-engine") as victim,
        ThreadPoolExecutor(1) as threads,
    ):
        for keys in fresh:
            _put_on_disk(victim, keys)
        part = BLOCKS * 3 // 4
        assert attacker.lookup(ATTACKERS[:part], lease=600, wait=WAIT).prefix_hits == part
        [before] = [each.calls for each in site.server.status().sessions if each.tenant == "acme"]
        waiting = threads.submit(lambda: attacker.lookup(ATTACKERS[part:], wait=WAIT, lease=600))
        site.server.wait_for(
            lambda status: any(each.tenant == "acme" and each.calls > before for each in status.sessions)
        )
        assert victim.prefetch(fresh[0]).no_room == 0
        assert KeyStatus.MISS not in victim.lookup(fresh[1]).statuses
        assert not waiting.done(), "the attacker's lookup waits"
        attacker.close()
        with contextlib.suppress(Exception):
            waiting.result(TIMEOUT)


def test_withdrawn_grants_of_others(site: Site) -> None:
    """A session withdraws only its own grants, however many ids it sends."""
    with _client(site, "zeta-engine") as victim:
        lease = victim.lookup(VICTIMS, wait=WAIT)
        assert lease.prefix_hits == len(VICTIMS)
        namespace = namespace_of(PART, tenant="acme")
        raw = RawSession(
            site.server.tcp, namespace, engine_id=victim.engine_id, credentials=site.credentials("acme-reader")
        )
        before = site.server.own_bytes()
        for start in range(0, 1 << 15, 256):
            request = cache_pb2.WithdrawGrantsRequest(session=raw.ref, grant_ids=range(start, start + 256))
            raw.cache.WithdrawGrants(request, timeout=TIMEOUT)
        assert site.server.own_bytes() - before < 32 * MIB
        with victim.read(lease, range(len(VICTIMS))) as batch:
            assert all(is_payload(key, view) for key, view in zip(VICTIMS, batch.views(), strict=True))
        with pytest.raises(grpc.RpcError) as refused:
            raw.cache.WithdrawGrants(
                cache_pb2.WithdrawGrantsRequest(session=raw.ref, grant_ids=range(257)), timeout=TIMEOUT
            )
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        raw.end()


def test_a_grant_that_is_withdrawn_before_its_call(site: Site) -> None:
    """The server refuses the call, whose client does not wait for it, and other ids are granted."""
    namespace = namespace_of(PART, tenant="acme")
    raw = RawSession(site.server.tcp, namespace, engine_id="late", credentials=site.credentials("acme-far"))
    raw.cache.WithdrawGrants(cache_pb2.WithdrawGrantsRequest(session=raw.ref, grant_ids=[7]), timeout=TIMEOUT)
    keys = [key_of(number, salt=f"late {next(SALTS)}") for number in range(4)]
    calls = [
        lambda number: raw.cache.PrepareStore(
            cache_pb2.PrepareStoreRequest(session=raw.ref, keys=pack_keys(keys), grant_id=number), timeout=TIMEOUT
        ),
        lambda number: raw.cache.Lookup(
            cache_pb2.LookupRequest(session=raw.ref, keys=pack_keys(ATTACKERS[:4]), grant_id=number), timeout=TIMEOUT
        ),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as refused:
            call(7)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    granted = calls[0](8)
    with pytest.raises(grpc.RpcError):
        calls[0](8)
    assert granted.store_id
    raw.cache.WithdrawGrants(cache_pb2.WithdrawGrantsRequest(session=raw.ref, grant_ids=[8]), timeout=TIMEOUT)
    assert site.server.status().stores == 0
    raw.end()


@pytest.mark.parametrize("quota", ["", f'[tenants.zeta]\nquota = {{ cpu = "{REGION // 4}" }}\n'], ids=["", "quotas"])
def test_a_leased_block_in_each_extent(tmp_path: Path, quota: str) -> None:
    """The attacker leases every fourth block, again and again. The victim stores a larger one."""
    made = make_site(tmp_path, region=REGION, config=quota, shared_memory=False)
    with made.server.start(), _client(made, "acme-far") as attacker, _client(made, "zeta-engine", 2 * PART) as victim:
        for start in range(0, BLOCKS, 16):
            batch = ATTACKERS[start : start + 16]
            attacker.store(batch, [payload(key, PART) for key in batch])
            attacker.flush(batch, wait=30)
        few = ATTACKERS[::4]
        leases = [attacker.lookup(few, lease=600, prefix=False)]
        key = key_of(0, salt="larger")

        def stored() -> bool:
            leases.append(attacker.lookup(few, lease=600, prefix=False))
            return StoreStatus.NO_ROOM not in victim.store([key], [payload(key, 2 * PART)])

        wait_until(stored, 2 * TIMEOUT, interval=0.5)
        buffers = filled(1, 2 * PART)
        assert victim.load([key], buffers, wait=WAIT) == 1
        assert is_payload(key, buffers[0])
        with pytest.raises(KVTierError), attacker.read(leases[0], [0]):
            pass
