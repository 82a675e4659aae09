"""The tier `valkey` with a real cluster of three servers, and the nodes of a cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from contracts.shared_tier import GENEROUS_SECONDS, ExpiringValueContract
from contracts.tier import DONE, FAILED, KIB, MISSING, SPACE, content, empty, full, held, key
from harness.certificates import Authority
from harness.polling import wait_until
from harness.redis_server import PROGRAMS, RedisCluster, RedisServer, needs_redis

from kvtier.tiers.remote.dialing import ServerAddress
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.object_store import StoreUnavailableError
from kvtier.tiers.remote.resp import Answer
from kvtier.tiers.remote.valkey import ValkeyTier
from kvtier.tiers.remote.valkey_nodes import SLOTS, owners_in, slot_of
from kvtier.tiers.remote.value_codec import name_of
from kvtier.tiers.secondary_tier import BlockBytes, Outcome

BLOCKS = [key(number) for number in range(60)]


LIMITS = RemoteLimits(deadline_seconds=1.0, ttl_seconds=1000)
"""A call must end in bounded time when a server hangs, but not too early on a busy machine."""


def open_tier(url: str, limits: RemoteLimits = LIMITS, **files: Path) -> ValkeyTier:
    return ValkeyTier("far", 1 << 30, url=url, limits=limits, **files)


@pytest.mark.remote
class TestValkeyClusterTier(ExpiringValueContract):
    @pytest.fixture(autouse=True, params=PROGRAMS)
    def _cluster(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
        needs_redis(request.param)
        self.cluster = RedisCluster(tmp_path, program=request.param)
        yield
        self.cluster.end()

    def start_store(self, directory: Path) -> None:
        self.cluster.start()

    def kill_store(self) -> None:
        for server in self.cluster.servers:
            server.kill()

    def make_tier(self, limits: RemoteLimits) -> ValkeyTier:
        return open_tier(self.cluster.url, limits)

    def write(self, name: bytes, value: bytes) -> None:
        self.cluster.server_of(name).command("SET", name, value)

    def read(self, name: bytes) -> bytes | None:
        found: bytes | None = self.cluster.server_of(name).command("GET", name)
        return found

    def ttl_of(self, name: bytes) -> float:
        return float(self.cluster.server_of(name).command("TTL", name))

    def freeze(self, *, frozen: bool) -> None:
        for server in self.cluster.servers:
            server.freeze(frozen=frozen)

    def make_full(self) -> None:
        for server in self.cluster.servers:
            server.command("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "4mb")


@pytest.mark.remote
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])
class TestCluster:
    @pytest.fixture
    def files(self, tmp_path: Path, *, is_encrypted: bool) -> dict[str, Path]:
        """Returns the options with which a tier verifies the servers, and proves itself to them."""
        if not is_encrypted:
            return {}
        self.authority = Authority(tmp_path)
        ours = self.authority.issue("kvtier")
        return {"tls_ca": Path(self.authority.ca), "tls_cert": Path(ours.cert), "tls_key": Path(ours.key)}

    @pytest.fixture
    def cluster(self, tmp_path: Path, files: dict[str, Path]) -> Iterator[RedisCluster]:
        needs_redis()
        cluster = RedisCluster(tmp_path, (self.authority.issue("store"), self.authority.ca) if files else None)
        cluster.start()
        yield cluster
        cluster.end()

    @pytest.fixture
    def tier(self, cluster: RedisCluster, files: dict[str, Path]) -> Iterator[ValkeyTier]:
        tier = open_tier(cluster.url, **files)
        yield tier
        tier.close()

    def test_a_block_is_at_the_node_of_its_slot(
        self, cluster: RedisCluster, tier: ValkeyTier, files: dict[str, Path]
    ) -> None:
        """The servers compute the same slots, and one address finds the whole cluster."""
        assert tier.store([full(name, [b"x"]) for name in BLOCKS]) == [DONE] * len(BLOCKS)
        counts = [server.command("DBSIZE") for server in cluster.servers]
        assert sum(counts) == len(BLOCKS)
        assert min(counts) > 0
        for name in BLOCKS[:5]:
            assert slot_of(name_of(SPACE, name)) == cluster.servers[0].command(
                "CLUSTER", "KEYSLOT", name_of(SPACE, name)
            )
        other = open_tier(cluster.servers[1].url, **files)
        assert other.lookup([(SPACE, name) for name in BLOCKS]) == [True] * len(BLOCKS)
        other.close()

    @pytest.mark.parametrize("fault", ["killed", "frozen"])
    def test_a_dead_node_loses_only_its_blocks(self, cluster: RedisCluster, tier: ValkeyTier, fault: str) -> None:
        """During loads: the others stay hits, no byte is wrong, and the node may return."""
        sizes = (64 * KIB, 7)
        blocks = [full(name, content(name, sizes)) for name in BLOCKS]
        assert tier.store(blocks) == [DONE] * len(BLOCKS)
        dead = cluster.servers[1]
        theirs = [cluster.server_of(name_of(SPACE, name)) is dead for name in BLOCKS]
        assert True in theirs
        wrong: list[bytes] = []
        slowest, loading, ended = 0.0, threading.Event(), threading.Event()

        def load() -> list[Outcome]:
            into = [empty(name, sizes) for name in BLOCKS]
            outcomes = tier.load(into)
            done: list[BlockBytes] = [block for block, each in zip(into, outcomes, strict=True) if each is DONE]
            wrong.extend(block.key for block in done if held(block) != content(block.key, sizes))
            return outcomes

        def keep_loading() -> None:
            nonlocal slowest
            while not ended.is_set():
                started = time.monotonic()
                load()
                slowest = max(slowest, time.monotonic() - started)
                loading.set()

        threads = [threading.Thread(target=keep_loading) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert loading.wait(GENEROUS_SECONDS)
        if fault == "killed":
            dead.kill()
        else:
            dead.freeze(frozen=True)
        for _ in range(20):
            outcomes = load()
            assert outcomes == [FAILED if is_theirs else DONE for is_theirs in theirs]
        assert str(dead.client_port) in (tier.last_error or "")
        assert tier.lookup([(SPACE, name) for name in BLOCKS]) == [not is_theirs for is_theirs in theirs]
        ended.set()
        for thread in threads:
            thread.join(GENEROUS_SECONDS)
            assert not thread.is_alive()
        assert not wrong
        assert slowest < GENEROUS_SECONDS
        if fault == "killed":
            dead.start()
        else:
            dead.freeze(frozen=False)
        wait_until(cluster.is_whole)
        wait_until(lambda: tier.store(blocks) == [DONE] * len(BLOCKS))
        assert load() == [DONE] * len(BLOCKS)
        assert tier.last_error is None

    def test_moved_slots_are_found(self, cluster: RedisCluster, tier: ValkeyTier) -> None:
        """A block of a slot that has moved is a miss at most until the slots are read again."""
        name = name_of(SPACE, BLOCKS[0])
        assert tier.store([full(BLOCKS[0], [b"x"])]) == [DONE]
        source = cluster.server_of(name)
        target = cluster.servers[(cluster.servers.index(source) + 1) % 3]
        slot, ids = str(slot_of(name)), {server: server.command("CLUSTER", "MYID") for server in (source, target)}
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        source.command("MIGRATE", "127.0.0.1", str(target.client_port), name, "0", "5000")
        assert tier.load([empty(BLOCKS[0], (1,))])[0] in (MISSING, DONE)
        for server in (target, source):
            server.command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        wait_until(lambda: tier.load([empty(BLOCKS[0], (1,))]) == [DONE])
        assert tier.last_error is None

    def test_a_cluster_that_is_down_is_explained(self, cluster: RedisCluster, tier: ValkeyTier) -> None:
        """The error names the setting that keeps the other nodes available."""
        for server in cluster.servers:
            server.command("CONFIG", "SET", "cluster-require-full-coverage", "yes")
        cluster.servers[2].kill()

        def explained() -> bool:
            assert set(tier.store([full(name, [b"x"]) for name in BLOCKS])) <= {DONE, FAILED}
            return "cluster-require-full-coverage" in (tier.last_error or "")

        wait_until(explained)


@pytest.mark.remote
def test_several_servers_without_a_cluster_are_refused(tmp_path: Path) -> None:
    """Blocks would be at one of them only."""
    needs_redis()
    server = RedisServer(tmp_path)
    server.start()
    tier = open_tier(f"{server.url},127.0.0.1:1")
    try:
        assert tier.store([full(BLOCKS[0], [b"x"])]) == [FAILED]
        assert "not in a cluster" in (tier.last_error or "")
    finally:
        tier.close()
        server.end()


def test_slots_have_the_crc_of_the_specification() -> None:
    """The specification gives the CRC16 of these digits; CLUSTER KEYSLOT gives these slots."""
    assert slot_of(b"123456789") == 0x31C3
    assert slot_of(b"foo") == 12182
    assert slot_of(b"somekey") == 11058


def test_owners_of_slots() -> None:
    """Hosts may be missing, and slots may have no node; replicas are not used."""
    answer: Answer = [
        [0, 5460, [b"a", 1, b"id", []], [b"replica", 9, b"id"]],
        [5461, 16382, [None, 2]],
    ]
    owners = owners_in(answer, "asked")
    assert owners[0] == owners[5460] == ServerAddress("a", 1)
    assert owners[5461] == owners[16382] == ServerAddress("asked", 2)
    assert owners[16383] is None
    assert len(owners) == SLOTS


@pytest.mark.parametrize(
    "answer",
    [
        None,
        5,
        b"",
        [5],
        [[]],
        [[0, 1]],
        [[0, 1, [b"a"]]],
        [[0, 1, [5, 5]]],
        [[1, 0, [b"a", 1]]],
        [[0, 16384, [b"a", 1]]],
        [[-1, 5, [b"a", 1]]],
        [[0, 1, [b"a", 0]]],
        [[0, 1, [b"a", 65536]]],
    ],
)
def test_invalid_slots(answer: Answer) -> None:
    with pytest.raises(StoreUnavailableError, match="invalid slots"):
        owners_in(answer, "asked")
