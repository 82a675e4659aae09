"""The tier `mooncake` with a real master and a real node."""

from __future__ import annotations

import contextlib
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.shared_tier import GENEROUS_SECONDS, KeyValueContract, checked
from contracts.tier import (
    CORRUPT,
    DONE,
    FAILED,
    KIB,
    MIB,
    MISSING,
    NO_SPACE,
    SPACE,
    content,
    empty,
    fetch,
    full,
    held,
    key,
)
from harness.mooncake_cluster import MASTER, MooncakeCluster, needs_mooncake
from harness.own_network import own_network
from harness.polling import wait_until

from kvtier.cuda.host.region import HostRegion
from kvtier.tiers.remote import mooncake_process
from kvtier.tiers.remote.encryption import EncryptedValues, KeyRing
from kvtier.tiers.remote.mooncake import MooncakeTier
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.value_codec import name_of
from kvtier.tiers.secondary_tier import BlockBytes, Outcome

pytestmark = pytest.mark.remote


HOSTILE_PEER = """
import ctypes, json, subprocess, sys
from pathlib import Path
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore
address, pid, name, master = int(sys.argv[1], 16), sys.argv[2], *sys.argv[3:]
store, engine = MooncakeDistributedStore(), TransferEngine()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) == 0
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
bad = ctypes.create_string_buffer(b"?" * 4096)
engine.register_memory(ctypes.addressof(bad), 4096)
def write(host, to):
    return engine.transfer_sync_write(host, ctypes.addressof(bad), to, 64)
value = store.get_replica_desc(name)[0].get_memory_descriptor().buffer_descriptor
inodes = [link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if "socket:" in str(link.readlink())]
rows = [row.split() for file in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]]
ports = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}
through = [port for port in ports if write(f"127.0.0.1:{port}", address) == 0]
node = write(value.transport_endpoint, value.buffer_address + 100)
print(json.dumps({"node": node, "client": through, "ports": len(ports)}))
"""


def mooncake_tier(cluster: MooncakeCluster, limits: RemoteLimits, **options: Any) -> MooncakeTier:
    return MooncakeTier("far", 1 << 30, master=MASTER, limits=limits, log=cluster.settings.log, **options)


class TestMooncakeTier(KeyValueContract):
    smallest_value = 1

    @pytest.fixture(autouse=True)
    def _cluster(self, tmp_path: Path) -> Iterator[None]:
        needs_mooncake()
        with own_network():
            self.cluster = MooncakeCluster(tmp_path)
            yield
            self.cluster.end()

    def start_store(self, directory: Path) -> None:
        self.cluster.start()

    def kill_store(self) -> None:
        self.cluster.kill()

    def make_tier(self, limits: RemoteLimits) -> MooncakeTier:
        """Returns a tier whose process is ready, if the store is."""
        tier = mooncake_tier(self.cluster, limits)
        if self.cluster.master is not None:
            wait_until(lambda: checked(tier) is None)
        return tier

    def write(self, name: bytes, value: bytes) -> None:
        self.cluster.write(name, value)

    def read(self, name: bytes) -> bytes | None:
        return self.cluster.read(name)

    def freeze(self, *, frozen: bool) -> None:
        self.cluster.freeze(frozen=frozen)

    def make_full(self) -> None:
        """Values that were asked for are leased: Mooncake does not evict them for ten seconds."""
        assert self.cluster.exists(name_of(SPACE, key(0)))
        self.cluster.fill()


class TestNodes:
    @pytest.fixture(autouse=True)
    def _network(self, tmp_path: Path) -> Iterator[None]:
        needs_mooncake()
        with own_network(), contextlib.ExitStack() as self.opened:
            self.directory = tmp_path
            yield

    def cluster(self, *options: str, nodes: int = 1) -> MooncakeCluster:
        cluster = MooncakeCluster(self.directory, *options, nodes=nodes)
        self.opened.callback(cluster.end)
        cluster.start()
        return cluster

    def tier(self, cluster: MooncakeCluster, deadline: float = 10.0, **options: Any) -> MooncakeTier:
        tier = mooncake_tier(cluster, RemoteLimits(deadline_seconds=deadline), **options)
        self.opened.callback(tier.close)
        return tier

    def tier_with_region(
        self, cluster: MooncakeCluster, deadline: float = 10.0
    ) -> tuple[MooncakeTier, list[BlockBytes]]:
        """Returns a tier, and eight blocks of two parts in the region that it uses."""
        region = HostRegion.create(16 * MIB)
        self.opened.callback(region.close)
        tier = self.tier(cluster, deadline)
        tier.use_region(region.pools, region.address, region.size_bytes)
        wait_until(lambda: checked(tier) is None)
        slots = [region.memory[at : at + MIB] for at in range(0, 16 * MIB, MIB)]
        blocks = [BlockBytes(SPACE, key(number), tuple(slots[2 * number : 2 * number + 2])) for number in range(8)]
        return tier, blocks

    def test_blocks_in_the_region_are_not_copied(self) -> None:
        """Only the headers are in other memory."""
        tier, blocks = self.tier_with_region(self.cluster())
        for block in blocks[:4]:
            for part, data in zip(block.parts, content(block.key, (MIB, MIB)), strict=True):
                part[:] = data
        assert tier.store(blocks[:4]) == [DONE] * 4
        into = [BlockBytes(SPACE, block.key, slots.parts) for block, slots in zip(blocks[:4], blocks[4:], strict=True)]
        assert tier.load(into) == [DONE] * 4
        assert [held(block) for block in into] == [content(block.key, (MIB, MIB)) for block in into]
        [client] = tier._clients
        assert client._staging.nbytes == mmap.PAGESIZE  # type: ignore[attr-defined]

    def test_a_late_load_does_not_write(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A load that has failed leaves the memory alone, which may have another block by then."""
        monkeypatch.setattr(mooncake_process, "SUSPECT_SECONDS", 0.1)
        cluster = self.cluster()
        tier, blocks = self.tier_with_region(cluster, deadline=0.5)
        block = blocks[0]
        for part, data in zip(block.parts, content(1, (MIB, MIB)), strict=True):
            part[:] = data
        assert tier.store([block]) == [DONE]
        cluster.freeze_process(cluster.nodes[0], frozen=True)
        assert tier.load([block]) == [FAILED]
        for part in block.parts:
            part[:] = b"n" * MIB
        cluster.freeze_process(cluster.nodes[0], frozen=False)
        wait_until(lambda: tier.lookup([(SPACE, block.key)]) == [True])
        assert tier.store([full(key(50), [b"x"])]) == [DONE]
        assert held(block) == (b"n" * MIB,) * 2
        assert tier.load([block]) == [DONE]
        assert held(block) == content(1, (MIB, MIB))

    def test_blocks_of_a_dead_node_are_misses(self) -> None:
        """Within the deadline, although the master reports them as present until it notices.

        Blocks of the other node are loaded meanwhile.
        """
        cluster = self.cluster(nodes=2)
        tier = self.tier(cluster, deadline=0.5)
        wait_until(lambda: checked(tier) is None)
        names = [key(number) for number in range(40)]
        for name in names:
            assert tier.store([full(name, content(name, (64 * KIB,)))]) == [DONE]
        cluster.kill_node(0)
        outcomes: dict[bytes, Outcome] = {}

        def load_all() -> set[Outcome]:
            for name in names:
                into = empty(name, (64 * KIB,))
                began = time.monotonic()
                [outcomes[name]] = tier.load([into])
                assert time.monotonic() - began < GENEROUS_SECONDS
                if outcomes[name] is DONE:
                    assert held(into) == content(name, (64 * KIB,))
                else:
                    assert tier.lookup([(SPACE, name)]) == [False]
            return set(outcomes.values())

        assert load_all() <= {DONE, FAILED, MISSING}
        wait_until(lambda: load_all() == {DONE, MISSING})
        lost = next(name for name in names if outcomes[name] is MISSING)
        wait_until(lambda: not cluster.exists(name_of(SPACE, lost)))
        assert tier.store([full(lost, content(lost, (64 * KIB,)))]) == [DONE]
        wait_until(lambda: tier.load([empty(lost, (64 * KIB,))]) == [DONE])

    def test_an_old_value_is_replaced_after_its_first_load(self) -> None:
        """Mooncake keeps the value of an existing key and reports success."""
        cluster = self.cluster()
        tier = self.tier(cluster)
        cluster.write(name_of(SPACE, key(1)), b"planted")
        assert tier.store([full(key(1), [b"block"])]) == [DONE]
        assert cluster.read(name_of(SPACE, key(1))) == b"planted"
        assert tier.load([empty(key(1), (5,))]) == [CORRUPT]
        assert tier.lookup([(SPACE, key(1))]) == [False]
        assert tier.store([full(key(1), [b"block"])]) == [DONE]
        assert fetch(tier, key(1), (5,)) == (b"block",)

    def test_a_node_that_evicts_causes_misses(self) -> None:
        cluster = self.cluster("-default_kv_lease_ttl=100")
        tier = self.tier(cluster)
        names = [key(number) for number in range(200)]
        outcomes = {tier.store([full(name, content(name, (MIB,)))])[0] for name in names}
        assert outcomes <= {DONE, NO_SPACE}
        found = tier.lookup([(SPACE, name) for name in names])
        assert 0 < found.count(True) < 130
        lost = names[found.index(False)]
        assert tier.load([empty(lost, (MIB,))]) == [MISSING]

    def test_a_crash_of_the_client_is_a_miss(self) -> None:
        tier = self.tier(self.cluster())
        tier.store([full(key(1), [b"x"])])
        child = tier._process._child
        assert child
        assert child._process
        child._process.kill()
        child.thread.join()
        assert fetch(tier, key(1), (1,)) == (b"x",)

    def test_a_peer_cannot_reach_the_region(self) -> None:
        """Mooncake's TCP ports accept writes from every peer, but only to registered memory.

        Values at a node can be damaged in this way, which the checksum detects.
        """
        cluster = self.cluster()
        tier, blocks = self.tier_with_region(cluster)
        for part in blocks[0].parts:
            part[:] = b"k" * MIB
        assert tier.store([blocks[0]]) == [DONE]
        child = tier._process._child
        assert child
        assert child._process
        pid = child._process.pid
        [mapped] = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:kvtier " in line]
        name = name_of(SPACE, blocks[0].key).decode()
        command = [sys.executable, "-c", HOSTILE_PEER, mapped.partition("-")[0], str(pid), name, MASTER]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        answer = json.loads(done.stdout.splitlines()[-1])
        assert answer["node"] == 0, "the peer can write"
        assert answer["ports"] > 0
        assert answer["client"] == [], "ports through which the peer has written"
        assert held(blocks[0]) == (b"k" * MIB,) * 2
        assert tier.load([blocks[0]]) == [CORRUPT]

    def test_encrypted_values(self) -> None:
        """The store has no plain bytes."""
        cluster = self.cluster()
        ring, parts = KeyRing(others=(bytes(32),)), content(1, (70_000, 5))
        tier = self.tier(cluster, codec=EncryptedValues(lambda: ring))
        assert tier.store([full(key(1), parts)]) == [DONE]
        assert parts[0][:100] not in (cluster.read(name_of(SPACE, key(1), 2)) or b"")
        assert fetch(tier, key(1), (70_000, 5)) == parts

    def test_a_start_without_a_master_or_with_a_wrong_protocol(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error says why."""
        monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "1")
        tier = MooncakeTier("far", 1 << 30, master=MASTER, limits=RemoteLimits())
        self.opened.callback(tier.close)
        assert "the master does not answer" in (checked(tier) or "")
        cluster = self.cluster()
        wrong = self.tier(cluster, protocol="pigeons")
        wait_until(lambda: "cannot start its client (error" in (checked(wrong) or ""), interval=0.2)
