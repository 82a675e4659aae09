"""Two servers, each with its own CPU tier, at one Redis server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.redis_server import RedisServer, needs_redis
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, KeyStatus

pytestmark = pytest.mark.remote

PART = 256 << 10
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(32)]
GENEROUS_SECONDS = 15.0
"""Limit for one call, whose deadline at the store is 0.25 s. The lookups wait up to 60 s."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    needs_redis()
    server = RedisServer(tmp_path)
    yield server
    server.end()


@pytest.fixture
def start(tmp_path: Path, redis: RedisServer) -> Callable[..., ServerProcess]:
    def make(name: str, options: str = "", more: str = "") -> ServerProcess:
        config = f'[[tiers]]\ntype = "valkey"\nname = "shared"\noptions = {{ url = "{redis.url}"{options} }}\n'
        (tmp_path / name).mkdir()
        return ServerProcess(tmp_path / name, region=32 * MIB, config=config + more).start()

    return make


def store(client: Client, keys: list[bytes]) -> None:
    client.store(keys, [payload(key, PART) for key in keys])


def load(client: Client, keys: list[bytes], *, wait: float = 60.0) -> int:
    """Returns how many blocks were loaded, and checks their bytes."""
    buffers = [bytearray(PART) for _ in keys]
    started = time.monotonic()
    count = client.load(keys, buffers, wait=wait)
    assert time.monotonic() - started < GENEROUS_SECONDS
    for key, buffer in list(zip(keys, buffers, strict=True))[:count]:
        assert bytes(buffer) == bytes(payload(key, PART))
    return count


def test_blocks_of_another_server_are_loaded(redis: RedisServer, start: Callable[[str], ServerProcess]) -> None:
    """A block that a client stores at one server is loaded, byte by byte, at the other."""
    redis.start()
    with (
        start("a") as first,
        start("b") as second,
        Client(first.endpoint, namespace=NAMESPACE) as one,
        Client(second.endpoint, namespace=NAMESPACE) as other,
    ):
        assert load(other, KEYS) == 0
        store(one, KEYS)
        wait_until(lambda: redis.command("DBSIZE") == len(KEYS))
        wait_until(lambda: load(other, KEYS) == len(KEYS))
        assert second.tier("shared").hits == len(KEYS)
        assert second.tier("shared").loaded_bytes == len(KEYS) * PART


def test_servers_with_the_same_keys_share_encrypted_blocks(
    redis: RedisServer, start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """A server with another key misses them until its file has the right key, too. No restart."""
    redis.start()
    right, wrong = (f'[[keys]]\ntenant = "*"\nkey = "{letter * 43}="\n' for letter in "AE")
    for name, text in (("first", right), ("second", wrong)):
        (tmp_path / f"{name}.toml").write_text(text)
        (tmp_path / f"{name}.toml").chmod(0o600)
    with (
        start("a", f', encryption_keys = "{tmp_path}/first.toml"') as first,
        start("b", f', encryption_keys = "{tmp_path}/second.toml"') as second,
        Client(first.endpoint, namespace=NAMESPACE) as one,
        Client(second.endpoint, namespace=NAMESPACE) as other,
    ):
        store(one, KEYS)
        wait_until(lambda: redis.command("DBSIZE") == len(KEYS))
        assert load(other, KEYS) == 0
        (tmp_path / "second.toml").write_text(wrong + right)
        wait_until(lambda: load(other, KEYS) == len(KEYS))
        assert redis.command("DBSIZE") == len(KEYS)
        assert second.tier("shared").healthy


def test_a_killed_store_causes_misses_and_no_error(redis: RedisServer, start: Callable[[str], ServerProcess]) -> None:
    """While loads run. The server finds new blocks after the store has started again."""
    redis.start()
    with (
        start("a") as first,
        start("b") as second,
        Client(first.endpoint, namespace=NAMESPACE) as one,
        Client(second.endpoint, namespace=NAMESPACE) as other,
    ):
        store(one, KEYS)
        wait_until(lambda: redis.command("DBSIZE") == len(KEYS))
        loaded: list[int] = []
        reader = threading.Thread(target=lambda: loaded.extend(load(other, [key]) for key in KEYS[:16]))
        reader.start()
        wait_until(lambda: bool(loaded))
        redis.kill()
        reader.join()
        assert len(loaded) == 16
        unread = KEYS[16:]
        for _ in range(20):
            assert load(other, unread) == 0
        started = time.monotonic()
        with other.lookup(unread, wait=60) as lease:
            assert lease.prefix_hits == 0
            assert lease.statuses[0] == KeyStatus.MISS
        assert time.monotonic() - started < GENEROUS_SECONDS
        assert not second.tier("shared").healthy
        assert load(one, KEYS[:1]) == 1, "the CPU tier of the first server still has the block"
        new = [key_of(number) for number in range(100, 104)]
        redis.start()
        wait_until(lambda: first.tier("shared").healthy and second.tier("shared").healthy)
        store(other, new)
        wait_until(lambda: redis.command("DBSIZE") == len(new))
        wait_until(lambda: load(one, new) == len(new))


def test_a_server_starts_before_its_store(redis: RedisServer, start: Callable[[str], ServerProcess]) -> None:
    with start("a") as server, Client(server.endpoint, namespace=NAMESPACE) as client:
        store(client, KEYS[:4])
        assert load(client, KEYS[:5]) == 4
        server.wait_for(lambda status: not status.tiers[1].healthy)
        redis.start()
        server.wait_for(lambda status: status.tiers[1].healthy)
        store(client, KEYS[4:8])
        wait_until(lambda: redis.command("DBSIZE") >= 4)


def test_a_slower_tier_takes_over_while_the_store_hangs(
    redis: RedisServer, start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """The blocks come from Redis, although S3 answers earlier, and from S3 while Redis hangs."""
    pytest.importorskip("obstore")
    redis.start()
    (tmp_path / "bucket").mkdir()
    s3 = f'[[tiers]]\ntype = "s3"\nname = "slower"\noptions = {{ url = "file://{tmp_path}/bucket" }}\n'
    with start("a", more=s3) as first, start("b", more=s3) as second:
        with Client(first.endpoint, namespace=NAMESPACE) as client:
            store(client, KEYS)
            client.flush(KEYS, wait=30)
            wait_until(lambda: redis.command("DBSIZE") == len(KEYS))
        with Client(second.endpoint, namespace=NAMESPACE) as client:
            quarter = len(KEYS) // 4
            for number in range(4):
                if number == 2:
                    redis.freeze(frozen=True)
                assert load(client, KEYS[number * quarter : (number + 1) * quarter]) == quarter
        assert (second.tier("shared").hits, second.tier("slower").hits) == (2 * quarter, 2 * quarter)
        assert not second.tier("shared").healthy
        redis.freeze(frozen=False)
