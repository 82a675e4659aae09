"""Tenants, retention and ttl: a real server, clients over real sockets, and a flood."""

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
    """A server with a tenant that has a quota in both tiers."""
    with ServerProcess(tmp_path, region=REGION, lmdb=32 * MIB, config=TENANTS) as process:
        yield process.start()


def client_of(server: ServerProcess, tenant: str) -> Client:
    """Returns a tenant's client."""
    return Client(server.endpoint, namespace=namespace_of(PART, tenant=tenant), timeouts=TIMEOUTS)


def keep(client: Client, **arguments: float) -> list[bytes]:
    """Stores what is to be still there later, and waits until it is on the disk."""
    keys = [key_of(number) for number in range(KEEP)]
    client.store(keys, [payload(key, PART) for key in keys], **arguments)
    assert set(client.flush(keys, wait=20)) == {DurableStatus.DURABLE}
    return keys


def flood(client: Client, nbytes: int = 10 * REGION, *, salt: str = "flood") -> None:
    """Stores so much, all of which comes to the disk."""
    block = np.zeros(PART, np.uint8)
    for start in range(0, nbytes // PART, 256):
        keys = [key_of(number, salt=salt) for number in range(start, start + 256)]
        assert set(client.store(keys, [block] * len(keys))) == {StoreStatus.GRANTED}
        client.flush(keys, wait=20)


def held_in(client: Client, keys: list[bytes]) -> dict[str, int]:
    """Returns how many blocks the tiers have; those that more than one has are in the first."""
    with client.lookup(keys, prefix=False, wait=30) as lease:
        hits = [tier for tier, status in zip(lease.sources, lease.statuses, strict=True) if status == KeyStatus.HIT]
    return {tier: hits.count(tier) for tier in hits}


def test_a_flood_does_not_cost_another_tenant_what_is_within_its_quota(server: ServerProcess) -> None:
    """Ten times the region: alice's blocks are all still there, in memory and on disk; who has no quota pays."""
    with client_of(server, "alice") as alice, client_of(server, "carol") as carol, client_of(server, "bob") as bob:
        keys = keep(alice)
        keep(carol)
        flood(bob)
        assert held_in(carol, keys) == {}
        assert held_in(alice, keys) == {"cpu": KEEP}
        assert set(alice.flush(keys, wait=0)) == {DurableStatus.DURABLE}
        assert alice.reset(wait=30) == 0
        assert held_in(alice, keys) == {"lmdb": KEEP}
        assert_serves(alice, keys)


def test_it_holds_after_a_sigkill_when_the_flood_comes_first(server: ServerProcess) -> None:
    """Nobody of alice's has opened a session in this life of the server: her blocks on disk are still hers."""
    with client_of(server, "alice") as alice:
        keys = keep(alice)
    server.restart()
    with client_of(server, "bob") as bob:
        flood(bob)
    shares = {share.tenant: share for share in server.tier("lmdb").shares}
    assert shares["alice"].used_bytes == KEEP * PART
    with client_of(server, "alice") as alice:
        assert held_in(alice, keys) == {"lmdb": KEEP}
        assert_serves(alice, keys)


def test_what_a_tenant_has_shows_in_the_status(server: ServerProcess) -> None:
    """Per tier: its quota, what it holds, what of that is retained."""
    with client_of(server, "alice") as alice:
        keep(alice, retain_for=600)
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


def test_what_a_request_retains_outlives_a_flood_of_its_own_tenant(server: ServerProcess) -> None:
    """Said once when it begins; it ends with its time, not with the request or the session."""
    with client_of(server, "bob") as bob:
        bob.begin_request("r", retain_for=600)
        keys = [key_of(number) for number in range(KEEP)]
        bob.store(keys, [payload(key, PART) for key in keys], request_id="r")
        assert set(bob.flush(keys, wait=20)) == {DurableStatus.DURABLE}
        bob.finish_request("r")
    with client_of(server, "bob") as bob:
        flood(bob)
        assert held_in(bob, keys) == {"cpu": KEEP}
        assert set(bob.flush(keys, wait=0)) == {DurableStatus.DURABLE}
        assert_serves(bob, keys)


def test_retained_blocks_go_when_their_time_is_over(tmp_path: Path) -> None:
    """Then they are blocks like any other, which here means: the least recently used."""
    lru = 'eviction = "lru"'
    with ServerProcess(tmp_path, region=REGION, lmdb=32 * MIB, config=f"[cpu]\n{lru}", tier_config=lru) as server:
        server.start()
        with client_of(server, "bob") as bob:
            keys = keep(bob, retain_for=1)
            deadline = time.monotonic() + 60
            for number in range(1000):
                flood(bob, 2 * REGION, salt=f"{number}")
                if not held_in(bob, keys):
                    return
                assert time.monotonic() < deadline


def test_no_more_is_retained_than_may_be(server: ServerProcess) -> None:
    """Half of what is nobody's quota; the answer says what is beyond it."""
    with client_of(server, "bob") as bob:
        keys = [key_of(number) for number in range(600)]
        with bob.write(keys, retain_for=600) as batch:
            for number, offset, size in zip(batch.wanted, batch.offsets, batch.sizes, strict=True):
                batch.memory[offset : offset + size] = payload(keys[number], PART).tobytes()
        most = (REGION - 4 * MIB) // 2 // PART
        assert batch.not_retained == 600 - most
        with bob.lookup(keys, retain_for=600) as lease:
            assert lease.not_retained == 600 - most
        assert server.tier("cpu").not_retained == 2 * (600 - most)
        flood(bob)
        assert held_in(bob, keys)["cpu"] == most


@pytest.mark.parametrize("retain_for", [-1.0, float(1 << 40)])
def test_a_time_that_makes_no_sense_costs_nothing(server: ServerProcess, retain_for: float) -> None:
    """A negative one is refused; one without end is cut to what the configuration allows."""
    with client_of(server, "bob") as bob:
        keys = [key_of(0)]
        if retain_for < 0:
            with pytest.raises(InvalidRequest, match="retain_for"):
                bob.store(keys, [payload(keys[0], PART)], retain_for=retain_for)
        else:
            bob.store(keys, [payload(keys[0], PART)], retain_for=retain_for)
            assert_serves(bob, keys)


def test_blocks_that_are_not_used_expire(tmp_path: Path) -> None:
    """In memory after its ttl, on disk after its own; and the misses say why."""
    with ServerProcess(
        tmp_path, region=REGION, lmdb=32 * MIB, config='[cpu]\nttl = "1s"', tier_config='ttl = "3s"'
    ) as server:
        server.start()
        with client_of(server, "alice") as alice:
            keys = keep(alice)
            server.wait_for(lambda status: status.tiers[0].expired == KEEP and status.tiers[0].used_bytes == 0)
            server.wait_for(lambda status: status.tiers[1].expired == KEEP and status.tiers[1].used_bytes == 0)
            assert held_in(alice, keys) == {}
