"""Prefetch over the wire: blocks of a tier below are in the CPU tier when the lookup comes."""

from pathlib import Path

import pytest
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import ServerProcess

from kvtier.client import Client, DurableStatus, InvalidRequest, KeyStatus, TierFilter

PART = 16 << 10
KEYS = [key_of(number) for number in range(300)]


def test_a_prefetch_promotes_blocks_without_a_lease(tmp_path: Path) -> None:
    """Also more blocks than one slice has. The server's statistics count no lookup."""
    with (
        ServerProcess(tmp_path).start() as server,
        Client(server.endpoint, namespace=namespace_of(PART)) as client,
    ):
        client.wait_until_connected(60)
        client.store(KEYS, [payload(key, PART) for key in KEYS])
        assert set(client.flush(KEYS, wait=60)) == {DurableStatus.DURABLE}
        assert client.reset(wait=60) == 0
        found = client.prefetch([*KEYS, key_of(1000)], request_id="later", wait=10, retain_for=60)
        assert (found.present + found.started, found.missing, found.unanswered) == (300, 1, 0)
        assert found.started > 0
        assert client.status().leases == 0
        wait_until(lambda: client.prefetch(KEYS).present == 300)
        assert client.status().lookup_keys == 0
        # A block that is still being loaded counts as present.
        wait_until(lambda: _statuses(client) == {KeyStatus.HIT})
        with client.lookup(KEYS) as lease:
            assert set(lease.source_indices) == {0}


def _statuses(client: Client) -> set[int]:
    with client.lookup(KEYS) as lease:
        return set(lease.statuses)


def test_a_prefetch_can_exclude_tiers(tmp_path: Path) -> None:
    """Blocks of an excluded tier are missing; an unknown tier is refused."""
    with (
        ServerProcess(tmp_path).start() as server,
        Client(server.endpoint, namespace=namespace_of(PART)) as client,
    ):
        client.wait_until_connected(60)
        client.store(KEYS[:4], [payload(key, PART) for key in KEYS[:4]])
        client.flush(KEYS[:4], wait=60)
        assert client.reset(wait=60) == 0
        assert client.prefetch(KEYS[:4], exclude=TierFilter(names=frozenset(["lmdb"]))).missing == 4
        with pytest.raises(InvalidRequest, match="unknown tier"):
            client.prefetch(KEYS[:4], exclude=TierFilter(names=frozenset(["tape"])))
