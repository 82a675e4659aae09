"""Nodes of Valkey, and object stores, that send wrong, too many or endless answers."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from contracts.tier import CORRUPT, DONE, FAILED, MISSING, SPACE, content, empty, fetch, full, key
from harness.hostile_stores import HostileRedis, HostileS3, S3Handler, running

from kvtier.tiers.remote import pack_finder
from kvtier.tiers.remote.bucket import InvalidNameError
from kvtier.tiers.remote.dialing import Dialer, ServerAddress
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.object_store import StoreRefusedError, StoreUnavailableError
from kvtier.tiers.remote.pack_format import folder_of, hour_of
from kvtier.tiers.remote.s3 import BucketAddress, BucketOptions, S3Tier, open_bucket
from kvtier.tiers.remote.valkey import ValkeyTier
from kvtier.tiers.remote.valkey_nodes import MAX_NODES, owners_in
from kvtier.tiers.remote.value_codec import name_of
from kvtier.tiers.secondary_tier import NamespaceId, TierError

LIMITS = RemoteLimits(deadline_seconds=5.0)
SIZES = (3000,)
KEYS = [key(number) for number in range(4)]
BAD = name_of(SPACE, KEYS[1])


@pytest.fixture
def redis() -> Iterator[HostileRedis]:
    server = HostileRedis()
    with running(server):
        yield server


@pytest.fixture
def tier(redis: HostileRedis) -> Iterator[ValkeyTier]:
    tier = ValkeyTier("far", 1 << 30, url=redis.url, limits=LIMITS)
    assert tier.store([full(each, content(each, SIZES)) for each in KEYS]) == [DONE] * 4
    yield tier
    tier.close()


def lie_about(command: bytes, answer: Iterable[bytes]) -> Callable[[list[bytes]], Iterable[bytes] | None]:
    return lambda given: answer if given[0] == command and given[1:2] in ([], [BAD]) else None


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ([b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"], MISSING),
        ([b"-ERR no\r\n"], MISSING),
        ([b"-MOVED 1 10.0.0.1:1\r\n"], MISSING),
        ([b"-ASK 1 127.0.0.1:1\r\n"], MISSING),
        ([b"$-1\r\n"], MISSING),
        ([b"$3\r\nbad\r\n"], CORRUPT),
        ([b"$9000\r\n", bytes(9000), b"\r\n"], CORRUPT),
        ([b"$30000000\r\n", bytes(30_000_000), b"\r\n"], MISSING),
    ],
    ids=["type", "error", "moved", "ask", "null", "short", "long", "30 MB"],
)
def test_a_wrong_value_is_a_miss_of_its_key(
    redis: HostileRedis, tier: ValkeyTier, answer: list[bytes], outcome: object
) -> None:
    """The other blocks of the job are loaded."""
    redis.lie = lie_about(b"GET", answer)
    assert tier.load([empty(each, SIZES) for each in KEYS]) == [DONE, outcome, DONE, DONE]
    redis.lie = lambda _: None
    assert tier.load([empty(each, SIZES) for each in KEYS[2:]]) == [DONE, DONE]


def test_a_key_of_another_type_is_not_asked_again(redis: HostileRedis, tier: ValkeyTier) -> None:
    """The store says that it exists, but it can neither be loaded nor replaced."""
    redis.lie = lie_about(b"GET", [b"-WRONGTYPE no\r\n"])
    assert tier.lookup([(SPACE, KEYS[1])]) == [True]
    assert tier.load([empty(KEYS[1], SIZES)]) == [MISSING]
    assert tier.lookup([(SPACE, each) for each in KEYS]) == [True, False, True, True]


@pytest.mark.parametrize(
    "answer",
    [
        [b"$9223372036854775807\r\n"],
        [b"$-9223372036854775808\r\n"],
        [b"$4294967297\r\n"],
        [b"*65536\r\n" * 5],
        [b"$5\r\nhello"],
        itertools.repeat(b"x" * 65536),
        itertools.repeat(b"*1\r\n"),
        [b"+OK\r\n" * 1000],
    ],
    ids=["2^63", "-2^63", "4 GiB", "nested", "half", "line", "deep", "many"],
)
@pytest.mark.parametrize("command", [b"GET", b"EXISTS"])
def test_an_answer_of_another_protocol_ends_the_connection(
    redis: HostileRedis, tier: ValkeyTier, command: bytes, answer: Iterable[bytes]
) -> None:
    """The next calls use a new one and are right."""
    redis.lie = lie_about(command, answer)
    if command == b"GET":
        assert set(tier.load([empty(KEYS[1], SIZES)])) <= {FAILED, MISSING, CORRUPT}
    else:
        assert tier.lookup([(SPACE, KEYS[1])]) in ([False], [True])
    redis.lie = lambda _: None
    assert fetch(tier, KEYS[0], SIZES) == content(KEYS[0], SIZES)


def test_an_answer_with_many_parts_is_bounded(redis: HostileRedis, tier: ValkeyTier) -> None:
    """65,536 texts of 1 MiB would be within the limits of each part."""
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        yield b"*65536\r\n"
        for _ in range(65536):
            sent += 1 << 20
            yield b"$1048576\r\n" + bytes(1 << 20) + b"\r\n"

    redis.lie = lie_about(b"EXISTS", parts())
    assert tier.lookup([(SPACE, KEYS[1])]) == [False]
    assert sent <= 64 << 20


def test_an_answer_too_many_is_not_taken_for_the_next_one(redis: HostileRedis, tier: ValkeyTier) -> None:
    redis.lie = lie_about(b"EXISTS", [b":0\r\n:0\r\n"])
    assert tier.lookup([(SPACE, KEYS[1])]) == [False]
    redis.lie = lambda _: None
    assert tier.lookup([(SPACE, KEYS[1])]) == [True]


@pytest.mark.parametrize(
    "host",
    [b"127.0.0.1", b"::1", b"::ffff:127.0.0.1", b"169.254.169.254", b"0.0.0.0", b"224.0.0.1", b"localhost", b"a b"],
)
def test_a_cluster_cannot_name_this_host(host: bytes) -> None:
    """The server would send the password to a service of its own host, or of its cloud."""
    with pytest.raises(StoreUnavailableError, match="no remote host"):
        owners_in([[0, 5, [host, 6379]]], "10.0.0.1")
    if b" " not in host:
        assert owners_in([[0, 5, [host, 6379]]], "127.0.0.1")[0] == ServerAddress(host.decode(), 6379)


def test_a_name_of_this_host_is_not_dialled(redis: HostileRedis) -> None:
    """Although the name that a cluster gives to a node looks like that of another host."""
    ends_at = time.monotonic() + 20
    Dialer().dial(ServerAddress("127.0.0.1", redis.port), ends_at).close()
    with pytest.raises(StoreUnavailableError, match="address of this host"):
        Dialer().dial(ServerAddress("127.0.0.1", redis.port, may_be_local=False), ends_at)


def test_a_cluster_has_a_limit_of_nodes() -> None:
    slots = [[slot, slot, [b"10.0.0.1", slot + 1]] for slot in range(MAX_NODES + 1)]
    assert owners_in(slots[:MAX_NODES], "a")[MAX_NODES - 1] == ServerAddress("10.0.0.1", MAX_NODES)
    with pytest.raises(StoreUnavailableError, match="more than"):
        owners_in(slots, "a")


def test_nodes_without_answers_end_a_job(redis: HostileRedis) -> None:
    """A cluster of a hundred nodes that accept and do not answer costs a few deadlines."""
    silent = HostileRedis("")  # all addresses of loopback
    silent.lie = lambda _: iter(lambda: time.sleep(0.01) or b"", None)  # never an answer
    owners = b"".join(
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$11\r\n127.0.1.%d\r\n:%d\r\n"
        % (first, min(first + 163, 16383), 100 + number, silent.port)
        for number, first in enumerate(range(0, 16384, 164))
    )
    count = len(range(0, 16384, 164))
    redis.lie = lambda given: {
        b"INFO": [b"$17\r\ncluster_enabled:1\r\n"],
        b"CLUSTER": [b"*%d\r\n" % count, owners],
    }.get(given[0])
    connects: list[object] = []
    with running(silent):
        tier = ValkeyTier("far", 1 << 30, url=redis.url, limits=RemoteLimits(deadline_seconds=0.05))
        tier._topology.connect = _counted(tier._topology.connect, connects)  # type: ignore[method-assign]
        names = [key(number) for number in range(300)]
        assert tier.load([empty(each, SIZES) for each in names]) == [FAILED] * 300
        assert len(connects) <= 8
        tier.close()


def _counted(connect: Callable[[str], object], connects: list[object]) -> Callable[[str], object]:
    def counted(node: str) -> object:
        connects.append(node)
        return connect(node)

    return counted


class TestObjectStore:
    @pytest.fixture
    def store(self) -> Iterator[HostileS3]:
        pytest.importorskip("obstore", reason="needs the package obstore: kvtier[s3]")
        server = HostileS3()
        with running(server):
            yield server

    @pytest.mark.parametrize("names", [0, 3])
    def test_a_list_that_continues_for_ever_ends(self, store: HostileS3, tmp_path: Path, names: int) -> None:
        """Each answer names the same next one, with the same names or without any."""
        requests = 0

        def loop(handler: S3Handler) -> bool:
            nonlocal requests
            requests += 1
            store.objects = {f"kv/f/{number}": b"x" for number in range(names)}
            more = "<NextContinuationToken>t</NextContinuationToken>"
            handler.reply(200, handler.listed(more).replace(b"false", b"true"))
            return True

        store.lie = loop
        bucket = open_bucket(BucketAddress.parse("s3://bucket/kv"), _options(store, tmp_path), 0.1)
        for call in (lambda: bucket.listed("f/", "f/", 10), lambda: bucket.folders("f/")):
            with pytest.raises(TierError, match="did not end"):
                call()
        before = requests
        time.sleep(0.1)
        assert requests <= before + 2, "the library has ended its requests"

    @pytest.mark.parametrize("name", ["9/../x", "9/..", "9//x", "9/./x", "9\x01", "9\x7f"])
    def test_a_name_that_the_library_refuses_affects_one_folder(
        self, store: HostileS3, tmp_path: Path, name: str
    ) -> None:
        """Its lists are refused. Stores and the blocks of other namespaces are not affected."""
        names = [NamespaceId(bytes([number]) * len(SPACE)) for number in (1, 2)]
        options = {"url": "s3://bucket", "limits": RemoteLimits(), **asdict(_options(store, tmp_path))}
        writer, reader = (S3Tier(each, 1 << 30, **options) for each in ("writer", "reader"))
        folder = f"{folder_of(names[0])}{hour_of(time.time())}"
        store.objects[f"{folder}/{name}"] = b""
        blocks = [full(key(1), content(key(1), SIZES), each) for each in names]
        assert writer.store(blocks) == [DONE, DONE]
        wanted = [(each, key(1)) for each in names]
        assert reader.lookup(wanted) == [False, True]
        assert repr(f"{folder}/{name}".encode())[2:-1] in (reader.last_error or "")
        del store.objects[f"{folder}/{name}"]
        time.sleep(pack_finder.REFRESH_SECONDS)
        assert reader.lookup(wanted) == [True, True]
        assert reader.last_error is None
        for tier in (reader, writer):
            tier.close()

    @pytest.mark.parametrize(
        ("where", "hidden"),
        [("a/h1/9/../x", "f/a/h1/9/"), ("a/h1/0//x", "f/a/h1/0/"), ("a/../x", "f/a/"), ("../x", "f/")],
    )
    def test_a_name_that_the_library_refuses_hides_one_folder(
        self, store: HostileS3, tmp_path: Path, where: str, hidden: str
    ) -> None:
        """From a list of all objects, which yields the objects of other folders once."""
        paths = [f"f/{folder}/{hour}/{number}" for folder in "0az" for hour in ("h0", "h1", "h2") for number in "012"]
        store.objects = dict.fromkeys([*paths, f"f/{where}"], b"x")
        bucket = open_bucket(BucketAddress.parse("s3://bucket"), _options(store, tmp_path), 1.0)
        found: list[str] = []
        with pytest.raises(InvalidNameError, match=re.escape(where.partition("x")[0])):
            found.extend(each.path for each in bucket.objects("f/"))
        assert sorted(found) == [path for path in paths if not path.startswith(hidden)]

    @pytest.mark.parametrize("prefix", ["f/{}", "f/", "f/a/", "f//", "elsewhere/f/", ""])
    def test_refused_lists_that_name_further_folders_end(self, store: HostileS3, tmp_path: Path, prefix: str) -> None:
        """The store names a folder in each folder, the folder itself, or one outside of it."""

        def refuse(handler: S3Handler) -> bool:
            asked = handler.query["prefix"]
            if "delimiter" in handler.query:
                named = f"{asked}a/" if prefix == "f/{}" else prefix
                body = f"<CommonPrefixes><Prefix>{named}</Prefix></CommonPrefixes>"
            else:
                body = f"<Contents><Key>{asked}../x</Key><LastModified>2026-01-01T00:00:00Z</LastModified><Size>1</Size></Contents>"
            handler.reply(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{body}</ListBucketResult>".encode())
            return True

        store.lie = refuse
        bucket = open_bucket(BucketAddress.parse("s3://bucket"), _options(store, tmp_path), 1.0)
        with pytest.raises(StoreRefusedError):
            list(bucket.objects("f/"))


def _options(store: HostileS3, directory: Path) -> BucketOptions:
    credentials = directory / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    return BucketOptions(endpoint=store.endpoint, credentials_file=credentials)
