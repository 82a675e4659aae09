"""Isolation of tenants, retention and TTL, with a real server and a flood of blocks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.server_process import MIB, ServerProcess
from rich.console import Console

from kvtier.client import Client, DurableStatus, InvalidRequest, KeyStatus, StoreStatus, Timeouts
from kvtier.protos.endpoint import parse_endpoint
from kvtier.server.commands import status as status_command
from kvtier.server.telemetry import status

PART = 16 << 10
REGION = 16 * MIB
KEEP = 128
TENANTS = '[tenants.alice]\nquota = {cpu = "4MiB", lmdb = "25%"}\n'
TIMEOUTS = Timeouts(connect=60.0, call=60.0, transfer=60.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Yields a server with a tenant that has a quota in both tiers."""
    with ServerProcess(tmp_path, region=REGION, lmdb=32 * MIB, config=TENANTS) as process:
        yield process.start()


def client_of(server: ServerProcess, tenant: str) -> Client:
    return Client(server.endpoint, namespace=namespace_of(PART, tenant=tenant), timeouts=TIMEOUTS)


def store_durably(client: Client, **arguments: float) -> list[bytes]:
    """Stores blocks and waits until they are durable."""
    keys = [key_of(number) for number in range(KEEP)]
    client.store(keys, [payload(key, PART) for key in keys], **arguments)
    assert set(client.flush(keys, wait=20)) == {DurableStatus.DURABLE}
    return keys


def flood(client: Client, nbytes: int = 10 * REGION, *, salt: str = "flood") -> None:
    """Stores this many bytes and waits until all have reached the disk tier."""
    block = np.zeros(PART, np.uint8)
    for start in range(0, nbytes // PART, 256):
        keys = [key_of(number, salt=salt) for number in range(start, start + 256)]
        assert set(client.store(keys, [block] * len(keys))) == {StoreStatus.GRANTED}
        client.flush(keys, wait=20)


def count_per_tier(client: Client, keys: list[bytes]) -> dict[str, int]:
    """Returns the number of blocks per tier; a block in several tiers counts in the first."""
    with client.lookup(keys, prefix=False, wait=30) as lease:
        hits = [tier for tier, status in zip(lease.sources, lease.statuses, strict=True) if status == KeyStatus.HIT]
    return {tier: hits.count(tier) for tier in hits}


def test_a_flood_evicts_no_blocks_within_a_quota(server: ServerProcess) -> None:
    """After ten times the region, alice's blocks are all in memory and on disk.

    Tenants without a quota pay.
    """
    with client_of(server, "alice") as alice, client_of(server, "carol") as carol, client_of(server, "bob") as bob:
        keys = store_durably(alice)
        store_durably(carol)
        flood(bob)
        assert count_per_tier(carol, keys) == {}
        assert count_per_tier(alice, keys) == {"cpu": KEEP}
        assert set(alice.flush(keys, wait=0)) == {DurableStatus.DURABLE}
        assert alice.reset(wait=30) == 0
        assert count_per_tier(alice, keys) == {"lmdb": KEEP}
        assert_serves(alice, keys)


def test_quotas_hold_after_a_restart_without_a_session(server: ServerProcess) -> None:
    """After a SIGKILL alice has no session yet; her blocks on disk still count as hers."""
    with client_of(server, "alice") as alice:
        keys = store_durably(alice)
    server.restart()
    with client_of(server, "bob") as bob:
        flood(bob)
    shares = {share.tenant: share for share in server.tier("lmdb").shares}
    assert shares["alice"].used_bytes == KEEP * PART
    with client_of(server, "alice") as alice:
        assert count_per_tier(alice, keys) == {"lmdb": KEEP}
        assert_serves(alice, keys)


def test_the_status_shows_the_shares_of_tenants(server: ServerProcess) -> None:
    """Per tier: quota, held bytes, and retained bytes."""
    with client_of(server, "alice") as alice:
        store_durably(alice, retain_for=600)
    for tier in server.status().tiers:
        rest, share = tier.shares
        assert (rest.tenant, rest.quota_bytes, rest.used_bytes) == ("", 0, 0)
        assert (share.tenant, share.used_bytes, share.retained_bytes) == ("alice", KEEP * PART, KEEP * PART)
        assert share.quota_bytes == (4 * MIB if tier.name == "cpu" else tier.capacity_bytes // 4)
    text = StringIO()
    status_command.show(server.status(), parse_endpoint(server.endpoint), Console(file=text, width=200))
    for piece in ("(the rest)", "alice", "4.0 MiB", "2.0 MiB"):
        assert piece in text.getvalue()
    cpu, _ = json.loads(status.to_json(server.status()))["tiers"]
    assert cpu["shares"][1] == {
        "tenant": "alice",
        "quota_bytes": 4 * MIB,
        "limit_bytes": None,
        "used_bytes": KEEP * PART,
        "retained_bytes": KEEP * PART,
    }


def test_retained_blocks_survive_a_flood_of_their_tenant(server: ServerProcess) -> None:
    """The request asks when it begins; retention ends at its time, not with request or session."""
    with client_of(server, "bob") as bob:
        bob.begin_request("r", retain_for=600)
        keys = [key_of(number) for number in range(KEEP)]
        bob.store(keys, [payload(key, PART) for key in keys], request_id="r")
        assert set(bob.flush(keys, wait=20)) == {DurableStatus.DURABLE}
        bob.finish_request("r")
    with client_of(server, "bob") as bob:
        flood(bob)
        assert count_per_tier(bob, keys) == {"cpu": KEEP}
        assert set(bob.flush(keys, wait=0)) == {DurableStatus.DURABLE}
        assert_serves(bob, keys)


def test_retained_blocks_are_evictable_after_their_time(tmp_path: Path) -> None:
    """They are then ordinary blocks, here the least recently used."""
    lru = 'eviction = "lru"'
    with ServerProcess(tmp_path, region=REGION, lmdb=32 * MIB, config=f"[cpu]\n{lru}", tier_config=lru) as server:
        server.start()
        with client_of(server, "bob") as bob:
            keys = store_durably(bob, retain_for=1)
            deadline = time.monotonic() + 60
            for number in range(1000):
                flood(bob, 2 * REGION, salt=f"{number}")
                if not count_per_tier(bob, keys):
                    return
                assert time.monotonic() < deadline


def test_retention_has_a_limit(server: ServerProcess) -> None:
    """The limit is half of the capacity outside quotas; the answer counts blocks beyond it."""
    with client_of(server, "bob") as bob:
        keys = [key_of(number) for number in range(600)]
        with bob.write(keys, retain_for=600) as batch:
            for number, offset, size in zip(batch.wanted, batch.offsets, batch.sizes, strict=True):
                batch.memory[offset : offset + size] = payload(keys[number], PART).tobytes()
        most = (REGION - 4 * MIB) // 2 // PART
        granted = len(batch.wanted)  # open stores pin only a part of the capacity
        assert batch.not_retained == granted - most > 0
        with bob.lookup(keys, retain_for=600) as lease:
            leased = lease.prefix_hits  # a lease pins only a part of the capacity
            assert lease.not_retained == leased - most > 0
        assert server.tier("cpu").not_retained == granted + leased - 2 * most
        flood(bob)
        assert count_per_tier(bob, keys)["cpu"] == most


@pytest.mark.parametrize("retain_for", [-1.0, float(1 << 40)])
def test_unusual_retention_times(server: ServerProcess, retain_for: float) -> None:
    """A negative time is refused; an infinite one is shortened to the configured maximum."""
    with client_of(server, "bob") as bob:
        keys = [key_of(0)]
        if retain_for < 0:
            with pytest.raises(InvalidRequest, match="retain_for"):
                bob.store(keys, [payload(keys[0], PART)], retain_for=retain_for)
        else:
            bob.store(keys, [payload(keys[0], PART)], retain_for=retain_for)
            assert_serves(bob, keys)


@pytest.mark.slow
def test_unused_blocks_expire(tmp_path: Path) -> None:
    """Each tier has its TTL, and the misses name the reason."""
    with ServerProcess(
        tmp_path, region=REGION, lmdb=32 * MIB, config='[cpu]\nttl = "1s"', tier_config='ttl = "3s"'
    ) as server:
        server.start()
        with client_of(server, "alice") as alice:
            keys = store_durably(alice)
            server.wait_for(lambda status: status.tiers[0].expired == KEEP and status.tiers[0].used_bytes == 0)
            server.wait_for(lambda status: status.tiers[1].expired == KEEP and status.tiers[1].used_bytes == 0)
            assert count_per_tier(alice, keys) == {}
