"""The tier `valkey` with a real Redis or Valkey server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from contracts.shared_tier import ExpiringValueContract
from contracts.tier import CORRUPT, DONE, FAILED, MIB, MISSING, SPACE, content, empty, fetch, full, key
from harness.certificates import Authority
from harness.redis_server import PROGRAMS, RedisServer, needs_redis

from kvtier.tiers.remote.dialing import ServerAddress
from kvtier.tiers.remote.encryption import EncryptedValues, KeyRing
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.resp import RespConnection
from kvtier.tiers.remote.valkey import ValkeyAddress, ValkeyTier
from kvtier.tiers.remote.valkey_store import ValkeyStore
from kvtier.tiers.remote.value_codec import name_of

ACL = "~kvtier/3/* +@connection +info +cluster|slots +exists +get +set +expire +unlink +eval"
"""Permissions that docs/shared-tiers.md names."""


def valkey_tier(url: str, limits: RemoteLimits | None = None, **options: object) -> ValkeyTier:
    return ValkeyTier("far", 1 << 30, url=url, limits=limits or RemoteLimits(), **options)  # type: ignore[arg-type]


@pytest.mark.remote
class TestValkeyTier(ExpiringValueContract):
    @pytest.fixture(autouse=True, params=PROGRAMS)
    def _server(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
        needs_redis(request.param)
        self.server = RedisServer(tmp_path, program=request.param)
        yield
        self.server.end()

    def start_store(self, directory: Path) -> None:
        self.server.start()

    def kill_store(self) -> None:
        self.server.kill()

    def make_tier(self, limits: RemoteLimits) -> ValkeyTier:
        return valkey_tier(self.server.url, limits)

    def write(self, name: bytes, value: bytes) -> None:
        self.server.command("SET", name, value)

    def read(self, name: bytes) -> bytes | None:
        found: bytes | None = self.server.command("GET", name)
        return found

    def ttl_of(self, name: bytes) -> float:
        return float(self.server.command("TTL", name))

    def freeze(self, *, frozen: bool) -> None:
        self.server.freeze(frozen=frozen)

    def make_full(self) -> None:
        self.server.command("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "3mb")


@pytest.mark.remote
class TestServer:
    @pytest.fixture(autouse=True)
    def _redis(self) -> None:
        needs_redis()

    def test_a_store_that_evicts_causes_misses(self, tmp_path: Path) -> None:
        """Stores never fail; the store drops old values by itself."""
        server = RedisServer(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
        server.start()
        tier = valkey_tier(server.url)
        try:
            names = [key(number) for number in range(40)]
            for name in names:
                assert tier.store([full(name, content(name, (MIB,)))]) == [DONE]
            there = tier.lookup([(SPACE, name) for name in names])
            assert 0 < there.count(True) < 10
            assert tier.load([empty(names[0], (MIB,))]) == [MISSING]
            assert tier.last_error is None
        finally:
            tier.close()
            server.end()

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_a_user_with_a_password(self, tmp_path: Path, program: str) -> None:
        """The file is read at each connection. Without permission the tier fails and says why."""
        password = tmp_path / "password"
        password.write_text("wrong\n")
        needs_redis(program)
        server = RedisServer(tmp_path, program=program)
        server.start()
        server.command("ACL", "SETUSER", "kv", "on", ">secret", *ACL.split())
        server.command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@read", "+@connection", "+info")
        try:
            tier = valkey_tier(server.url, username="kv", password_file=password)
            assert tier.store([full(key(1), [b"x"])]) == [FAILED]
            assert "WRONGPASS" in (tier.last_error or "")
            password.write_text("secret\n")
            tier.close()
            tier = valkey_tier(server.url, username="kv", password_file=password)
            assert tier.store([full(key(1), [b"x"])]) == [DONE]
            server.command("SET", name_of(SPACE, key(3)), "damaged")
            assert tier.load([empty(key(1), (1,)), empty(key(3), (1,))]) == [DONE, CORRUPT]
            assert tier.last_error is None
            reader = valkey_tier(server.url, username="reader", password_file=password)
            assert fetch(reader, key(1), (1,)) == (b"x",)
            assert reader.store([full(key(2), [b"x"])]) == [FAILED]
            assert "permissions" in (reader.last_error or "")
            for each in (tier, reader):
                each.close()
        finally:
            server.end()

    def test_encrypted_values(self, tmp_path: Path) -> None:
        """The user needs access to the names of format 4 only. The server has no plain bytes."""
        server = RedisServer(tmp_path)
        server.start()
        server.command("ACL", "SETUSER", "kv", "on", ">secret", *ACL.replace("kvtier/3/", "kvtier/4/").split())
        password, parts = tmp_path / "password", content(1, (70_000, 5))
        password.write_text("secret\n")
        keys, others = KeyRing(others=(bytes(32),)), KeyRing(others=(bytes(range(32)),))
        with_key, without = (
            valkey_tier(
                server.url, username="kv", password_file=password, codec=EncryptedValues(lambda ring=ring: ring)
            )
            for ring in (keys, others)
        )
        try:
            assert with_key.store([full(key(1), parts), full(key(2), parts)]) == [DONE, DONE]
            assert without.load([empty(key(1), (70_000, 5))]) == [MISSING]
            assert without.lookup([(SPACE, key(1)), (SPACE, key(2))]) == [False, True]
            assert fetch(with_key, key(1), (70_000, 5)) == parts
            name = name_of(SPACE, key(1), EncryptedValues.FORMAT)
            value = bytearray(server.command("GET", name))
            assert parts[0][:100] not in value
            value[-20] ^= 1
            server.command("SET", name, bytes(value))
            assert with_key.load([empty(key(1), (70_000, 5))]) == [CORRUPT]
            assert server.command("GET", name) is None
            assert (with_key.last_error, without.last_error) == (None, None)
        finally:
            with_key.close()
            without.close()
            server.end()

    def test_tls_with_a_certificate_of_the_client(self, tmp_path: Path) -> None:
        """The store's certificate is verified; the store can demand one of the server."""
        authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
        theirs, ours = authority.issue("store"), authority.issue("kvtier")
        server = RedisServer(tmp_path, tls=(theirs, authority.ca))
        server.start()
        pair = {"tls_cert": Path(ours.cert), "tls_key": Path(ours.key)}
        tiers = [
            valkey_tier(server.url, tls_ca=Path(ca), **files)
            for ca in (authority.ca, stranger.ca)
            for files in (pair, {})
        ]
        try:
            outcomes = [tier.store([full(key(1), [b"x"])]) for tier in tiers]
            assert outcomes == [[DONE], [FAILED], [FAILED], [FAILED]]
            assert fetch(tiers[0], key(1), (1,)) == (b"x",)
            assert all(tier.last_error for tier in tiers[1:])
        finally:
            for tier in tiers:
                tier.close()
            server.end()

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        """The calls fail, and work as soon as the file exists."""
        server = RedisServer(tmp_path)
        server.start()
        server.command("ACL", "SETUSER", "default", ">secret", "on")
        tier = valkey_tier(server.url, password_file=tmp_path / "password")
        try:
            assert tier.store([full(key(1), [b"x"])]) == [FAILED]
            assert f"{tmp_path}/password: No such file" in (tier.last_error or "")
            (tmp_path / "password").write_text("secret")
            assert tier.store([full(key(1), [b"x"])]) == [DONE]
        finally:
            tier.close()
            server.end()

    def test_a_database_of_the_server(self, tmp_path: Path) -> None:
        server = RedisServer(tmp_path)
        server.start()
        tier = valkey_tier(f"{server.url}/3")
        try:
            assert tier.store([full(key(1), [b"x"])]) == [DONE]
            assert server.command("EXISTS", name_of(SPACE, key(1))) == 0
            assert fetch(tier, key(1), (1,)) == (b"x",)
        finally:
            tier.close()
            server.end()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("valkey://cache", ValkeyAddress((ServerAddress("cache", 6379),), 0, tls=False)),
        ("redis://cache:7/", ValkeyAddress((ServerAddress("cache", 7),), 0, tls=False)),
        ("valkeys://10.0.0.1:6380/12", ValkeyAddress((ServerAddress("10.0.0.1", 6380),), 12, tls=True)),
        (
            "valkey://a,b:7,[::1]:8",
            ValkeyAddress((ServerAddress("a", 6379), ServerAddress("b", 7), ServerAddress("::1", 8)), 0, tls=False),
        ),
        ("rediss://[fd00::1]", ValkeyAddress((ServerAddress("fd00::1", 6379),), 0, tls=True)),
    ],
)
def test_addresses(url: str, address: ValkeyAddress) -> None:
    assert ValkeyAddress.parse(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "cache:6379",
        "http://cache",
        "valkey://",
        "valkey://cache:99999",
        "valkey://cache/x",
        "valkey://cache?db=1",
        "valkey://a,",
        "valkey://a,b/1",
    ],
)
def test_invalid_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="must"):
        ValkeyAddress.parse(url)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="password_file") as caught:
        ValkeyAddress.parse("valkey://user:secret@cache")
    assert "secret" not in str(caught.value)


def test_a_call_reads_no_values_of_an_unfinished_load() -> None:
    """It uses another connection, because the rest of the values may still come."""
    peers: list[socket.socket] = []

    def dial(_: float) -> RespConnection:
        ours, theirs = socket.socketpair()
        theirs.sendall(b"+PONG\r\n" if peers else b"$1\r\na\r\n:1\r\n$1\r\nb\r\n:1\r\n")
        peers.append(theirs)
        return RespConnection(ours)

    store = ValkeyStore(dial, 10.0, lambda: None)
    values = [memoryview(bytearray(1)) for _ in range(2)]
    load = iter(store.get([b"first", b"second"], [[value] for value in values], 60.0))
    assert next(load) == 1
    store.ping()
    assert len(peers) == 2
    assert next(load) == 1
    assert [bytes(value) for value in values] == [b"a", b"b"]
    store.close()
    for peer in peers:
        peer.close()
