"""The tier `s3` with SeaweedFS (S3), with Azurite (Azure Blob Storage), and with a directory."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs the package obstore: kvtier[s3]")

import obstore
from contracts.pack_tier import PackTierContract
from contracts.shared_tier import ROW
from contracts.tier import CORRUPT, DONE, FAILED, MISSING, NO_SPACE, content, empty, fetch, full
from harness.azurite import AzuriteServer, needs_azurite
from harness.command_line import json_output
from harness.polling import wait_until
from harness.seaweed import SeaweedServer, needs_seaweed

from kvtier.tiers.remote.bucket import Bucket
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.pack_format import PackName, folder_of, mark_of, start_of
from kvtier.tiers.remote.s3 import BucketAddress, BucketOptions, S3Tier, open_bucket
from kvtier.tiers.secondary_tier import NamespaceId, Outcome, SecondaryTier, TierOpenError


def s3_tier(limits: RemoteLimits | None = None, **options: object) -> S3Tier:
    return S3Tier("far", 1 << 30, limits=limits or RemoteLimits(deadline_seconds=5), **options)  # type: ignore[arg-type]


Server = SeaweedServer | AzuriteServer


def bucket_of(server: Server) -> Bucket:
    options = BucketOptions(endpoint=server.endpoint, credentials_file=server.credentials)
    return open_bucket(BucketAddress.parse(server.url), options, 5.0)


def paths_in(bucket: Bucket, folder: str, after: str, limit: int) -> list[str]:
    return [each.path for each in bucket.listed(folder, after, limit)]


@pytest.fixture(scope="module", params=["s3", "azure"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yields a server that starts when a test needs it, because a start takes seconds."""
    server: Server
    if request.param == "s3":
        needs_seaweed()
        server = SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    else:
        needs_azurite()
        server = AzuriteServer(tmp_path_factory.mktemp("azurite"))
    yield server
    server.end()


@pytest.mark.remote
class TestS3Tier(PackTierContract):
    limits = hasty_limits = RemoteLimits(deadline_seconds=2.0, ttl_seconds=1000)

    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server

    @pytest.fixture
    def store(self, tmp_path: Path) -> None:
        self.start_store(tmp_path)

    def start_store(self, directory: Path) -> None:
        self.server.start()

    def kill_store(self) -> None:
        self.server.kill()

    def make_tier(self, limits: RemoteLimits) -> SecondaryTier:
        return s3_tier(limits, **self.server.options())

    def paths(self) -> list[str]:
        return self.server.paths()

    def get(self, path: str) -> bytes:
        return bytes(obstore.get(self.server.client(), path).bytes())

    def put(self, path: str, content: bytes) -> None:
        obstore.put(self.server.client(), path, content)

    def delete(self, *paths: str) -> None:
        obstore.delete(self.server.client(), list(paths))

    def freeze(self, *, frozen: bool) -> None:
        self.server.freeze(frozen=frozen)

    def make_full(self) -> None:
        pytest.skip("an object store has no limit; see test_answers_of_a_store")


@pytest.mark.remote
class TestServer:
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        server.start()

    @pytest.mark.parametrize("server", ["s3"], indirect=True)
    def test_a_user_who_may_only_read(self, server: SeaweedServer) -> None:
        """Stores fail and say why; loads work."""
        writer = s3_tier(**server.options())
        reader = s3_tier(**server.options() | {"credentials_file": server.reader})
        assert writer.store([full(ROW[0], [b"x"])]) == [DONE]
        assert fetch(reader, ROW[0], (1,)) == (b"x",)
        assert reader.store([full(ROW[1], [b"x"])]) == [FAILED]
        assert "AccessDenied" in (reader.last_error or "")
        for tier in (writer, reader):
            tier.close()

    @pytest.mark.parametrize("server", ["azure"], indirect=True)
    def test_a_missing_container_is_named(self, server: AzuriteServer) -> None:
        """SeaweedFS would create it."""
        options = server.options()
        tier = s3_tier(**options | {"url": options["url"].replace("blocks", "missing")})
        assert tier.store([full(ROW[0], [b"x"])]) == [FAILED]
        assert "the bucket does not exist" in (tier.last_error or "")
        tier.close()

    def test_an_object_is_not_replaced(self, server: Server) -> None:
        """A write has the header If-None-Match: *."""
        bucket = bucket_of(server)
        bucket.write("once", memoryview(b"first"))
        bucket.write("once", memoryview(b"other"))
        assert bytes(bucket.read("once", 0, 5)) == b"first"
        bucket.delete(["once", "never"])
        assert server.paths() == []

    def test_lists_begin_after_a_time(self, server: Server) -> None:
        """And continue in later hours; folders are listed by themselves."""
        bucket = bucket_of(server)
        folder = folder_of(NamespaceId(b"a space of lists" * 2))
        times = [1_795_575_600.0 + 1800 * number for number in range(5)]
        names = [PackName.new(folder, time, 64).path for time in times]
        for name in names:
            bucket.write(name, memoryview(b"x" * 64))
        for number, time in enumerate(times):
            assert paths_in(bucket, folder, mark_of(folder, time), 9) == names[number:]
            assert paths_in(bucket, folder, mark_of(folder, time + 0.001), 9) == names[number + 1 :]
        hours = bucket.folders(folder)
        assert hours == ["2026-11-25T03", "2026-11-25T04", "2026-11-25T05"]
        for number, hour in enumerate(hours):
            assert paths_in(bucket, folder, start_of(folder, hour), 9) == names[2 * number :]
            assert paths_in(bucket, f"{folder}{hour}/", start_of(folder, hour), 9) == names[2 * number : 2 * number + 2]

    def test_old_objects_are_deleted(self, server: Server, tmp_path: Path) -> None:
        """By `kvtier remote gc`, with the credentials of the tier."""
        tier = s3_tier(**server.options())
        assert tier.store([full(ROW[0], [b"x"])]) == [DONE]
        config = tmp_path / "kvtier.toml"
        options = "\n".join(f'{key} = "{value}"' for key, value in server.options().items())
        config.write_text(f'data_dir = "{tmp_path}"\n[[tiers]]\ntype = "s3"\n[tiers.options]\n{options}\n')
        assert len(server.paths()) == 1
        assert json_output("remote", "gc", "--config", str(config))["objects"] == []
        wait_until(lambda: json_output("remote", "gc", "--config", str(config), "--older-than", "1s")["objects"])
        assert server.paths() == []
        assert tier.load([empty(ROW[0], (1,))]) == [MISSING]
        tier.close()


def test_a_directory_is_a_bucket(tmp_path: Path) -> None:
    """For tests: the objects are files, and a second server reads them."""
    url = f"file://{tmp_path}/bucket"
    first, second = s3_tier(url=url), s3_tier(url=url)
    blocks = [full(name, content(name, (70_000, 5))) for name in ROW]
    assert first.store(blocks) == [DONE] * len(ROW)
    assert fetch(second, ROW[7], (70_000, 5)) == content(ROW[7], (70_000, 5))
    (file,) = (path for path in (tmp_path / "bucket").rglob("*") if path.is_file())
    os.truncate(file, 200_000)
    outcomes = second.load([empty(name, (70_000, 5)) for name in ROW])
    assert outcomes == [DONE] * 2 + [CORRUPT] * (len(ROW) - 2)
    file.unlink()
    assert first.load([empty(ROW[0], (70_000, 5))]) == [MISSING]
    for tier in (first, second):
        tier.close()


class AnsweringStore:
    """An HTTP server with one answer to all calls: no store here can be made to give these.

    A list has all names, also if it should begin later. Only without a bucket it has the error.
    """

    def __init__(self, status: int, code: str, names: Sequence[str] = ()) -> None:
        contents = "".join(
            f"<Contents><Key>{name}</Key><Size>1</Size><LastModified>2026-11-26T00:00:00Z</LastModified></Contents>"
            for name in names
        )

        tokens = self.session_tokens = set[str | None]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                tokens.add(self.headers["x-amz-security-token"])
                if self.command == "PUT":
                    self.rfile.read(int(self.headers["Content-Length"]))
                body = f"<Error><Code>{code}</Code></Error>".encode()
                if self.command == "GET" and "list-type" in self.path and status != HTTPStatus.NOT_FOUND:
                    text = f"<IsTruncated>false</IsTruncated>{contents}"
                    body = f"<ListBucketResult>{text}</ListBucketResult>".encode()
                    self.send_response(200)
                else:
                    self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_GET  # noqa: N815 - the name is that of http.server

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "outcome", "error"),
    [
        (507, "InsufficientStorage", NO_SPACE, "the store is full"),
        (403, "QuotaExceeded", NO_SPACE, "the store is full"),
        (403, "AccessDenied", FAILED, "cannot store: status 403, AccessDenied"),
        (404, "NoSuchBucket", FAILED, "the bucket does not exist"),
        (404, "ContainerNotFound", FAILED, "the bucket does not exist"),
        (501, "NotImplemented", FAILED, "status 501, NotImplemented"),
        (503, "SlowDown", FAILED, "status 503, SlowDown"),
        (412, "PreconditionFailed", DONE, ""),
    ],
)
def test_answers_of_a_store(tmp_path: Path, status: int, code: str, outcome: Outcome, error: str) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    store = AnsweringStore(status, code)
    tier = s3_tier(url="s3://bucket", endpoint=store.endpoint, credentials_file=credentials)
    try:
        assert tier.store([full(ROW[0], [b"x"])]) == [outcome]
        assert error in (tier.last_error or "")
        assert bool(tier.last_error) == bool(error)
    finally:
        tier.close()
        store.close()


@pytest.mark.parametrize("token", [None, "temporary"])
def test_temporary_credentials_have_a_session_token(tmp_path: Path, token: str | None) -> None:
    credentials = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = a\naws_secret_access_key = b\n"
    credentials.write_text(text + (f"aws_session_token = {token}\n" if token else ""))
    store = AnsweringStore(412, "PreconditionFailed")
    tier = s3_tier(url="s3://bucket", endpoint=store.endpoint, credentials_file=credentials)
    try:
        assert tier.store([full(ROW[0], [b"x"])]) == [DONE]
        assert store.session_tokens == {token}
    finally:
        tier.close()
        store.close()


def test_a_store_may_ignore_the_offset_of_a_list(tmp_path: Path) -> None:
    """As Azurite before 3.37 does. The newest names are found, also after many old ones."""
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    store = AnsweringStore(200, "", [f"kv/folder/{number:04}" for number in range(2500)])
    try:
        options = BucketOptions(endpoint=store.endpoint, credentials_file=credentials)
        bucket = open_bucket(BucketAddress.parse("s3://bucket/kv"), options, 5.0)
        assert paths_in(bucket, "folder/", "folder/2497", 9) == ["folder/2498", "folder/2499"]
        assert paths_in(bucket, "folder/", "folder/", 1) == ["folder/0000"]
    finally:
        store.close()


def test_a_missing_or_wrong_file_is_named(tmp_path: Path) -> None:
    """Calls fail, and work as soon as the file is right."""
    credentials = tmp_path / "credentials"
    store = AnsweringStore(412, "PreconditionFailed")
    tier = s3_tier(url="s3://bucket", endpoint=store.endpoint, credentials_file=credentials)
    try:
        assert tier.store([full(ROW[0], [b"x"])]) == [FAILED]
        assert f"{credentials}: No such file" in (tier.last_error or "")
        credentials.write_text("[default]\naws_access_key_id = a\n")
        assert tier.store([full(ROW[0], [b"x"])]) == [FAILED]
        assert "no aws_secret_access_key" in (tier.last_error or "")
        credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
        assert tier.store([full(ROW[0], [b"x"])]) == [DONE]
        assert tier.last_error is None
    finally:
        tier.close()
        store.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses to start and says what to install."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(TierOpenError, match=r"pip install 'kvtier\[s3\]'"):
        s3_tier(url="s3://bucket")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("s3://bucket", BucketAddress("s3", "bucket", "")),
        ("s3://bucket/", BucketAddress("s3", "bucket", "")),
        ("s3://my.bucket-1/a/b/", BucketAddress("s3", "my.bucket-1", "a/b/")),
        ("gs://bucket/a", BucketAddress("gs", "bucket", "a/")),
        ("az://account/container/a", BucketAddress("az", "account/container", "a/")),
        ("file:///tmp/x", BucketAddress("file", "/tmp/x", "")),
    ],
)
def test_addresses(url: str, address: BucketAddress) -> None:
    assert BucketAddress.parse(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket",
        "http://bucket",
        "s3://",
        "s3://a",
        "s3://bucket/a//x",
        "s3://bucket/x?y",
        "az://account",
        "file://x/y",
    ],
)
def test_invalid_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="must"):
        BucketAddress.parse(url)


def test_credentials_in_an_address_are_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="credentials_file") as caught:
        BucketAddress.parse("s3://key:secret@bucket")
    assert "secret" not in str(caught.value)
