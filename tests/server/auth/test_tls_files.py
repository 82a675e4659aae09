"""TLS and mTLS over TCP: which clients are accepted, and replacement of certificates."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from harness.auth_site import KEYS, PART, TIMEOUTS, Site, error_of, make_site, refusal_error
from harness.bulk import wait_for_bulk
from harness.certificates import Authority, Pair
from harness.launch import launch, refused_start
from harness.payloads import assert_serves, namespace_of, payload
from harness.polling import wait_until

from kvtier.client import AsyncClient, Client, Credentials, InvalidRequest, NotConnected
from kvtier.cuda.host.socket_io import TlsConnection
from kvtier.protos.wire.socket_frames import CALLS_PROTOCOL, STREAMS_PROTOCOL
from kvtier.server.auth.tls_files import server_credentials
from kvtier.server.auth.tokens import new_token


def peer_serial(address: str, ca: str, protocol: str = "h2") -> int:
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols([protocol])
    with (
        socket.create_connection((host, int(port)), 5) as plain,
        context.wrap_socket(plain, server_hostname=host) as tls,
    ):
        shown = tls.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def test_blocks_travel_over_tls_through_the_bulk_process(site: Site) -> None:
    """A client with the CA and a token stores and loads; the bulk process uses TLS."""
    with site.client("acme-far") as client:
        wait_for_bulk(client)
        assert client.transport == "tcp"
        client.store(KEYS, [payload(key, PART) for key in KEYS])
        assert_serves(client, KEYS)
        streams = client._transport._sockets._streams  # type: ignore[attr-defined]
        assert {type(connection) for connection in streams._idle} == {TlsConnection}


async def test_the_asyncio_client_uses_tls(site: Site) -> None:
    namespace = namespace_of(PART, model="aio")
    credentials = site.credentials("acme-far")
    async with AsyncClient(site.server.tcp, namespace=namespace, credentials=credentials, timeouts=TIMEOUTS) as client:
        await client.store(KEYS, [payload(key, PART) for key in KEYS])
        buffers = [payload(key, PART) * 0 for key in KEYS]
        assert await client.load(KEYS, buffers, wait=30) == len(KEYS)
        assert all((found == payload(key, PART)).all() for key, found in zip(KEYS, buffers, strict=True))


@pytest.mark.slow
def test_a_client_with_another_ca_does_not_connect(site: Site, tmp_path: Path) -> None:
    """The client verifies the server's certificate and refuses a connection in the clear."""
    other = Authority(tmp_path, "other")
    token = site.tokens.token["acme-far"]
    for credentials in (Credentials(ca=other.ca, token=token), Credentials(token=token, insecure=True)):
        with Client(site.server.tcp, namespace=namespace_of(PART), credentials=credentials) as client:
            assert isinstance(error_of(client), NotConnected)


def test_a_token_is_not_sent_in_the_clear() -> None:
    """Without TLS a token needs explicit permission; a client key needs its certificate."""
    with pytest.raises(InvalidRequest, match=r"is not sent to 127\.0\.0\.1:1 without TLS"):
        Client("127.0.0.1:1", namespace=namespace_of(PART), credentials=Credentials(token=new_token()))
    with pytest.raises(InvalidRequest, match="a certificate needs its key"):
        Client("127.0.0.1:1", namespace=namespace_of(PART), credentials=Credentials(cert="/c.pem"))
    with pytest.raises(InvalidRequest, match=r"ca /nowhere/ca\.pem: No such file"):
        Client("127.0.0.1:1", namespace=namespace_of(PART), credentials=Credentials(ca="/nowhere/ca.pem"))


def test_unusable_credential_files_are_named_in_the_error(tmp_path: Path) -> None:
    """With gRPC alone a mismatched key or an empty CA file looks like a refused connection."""
    authority = Authority(tmp_path)
    pair, other = authority.issue("engine-1"), authority.issue("engine-2")
    junk = tmp_path / "junk.pem"
    junk.write_text("no PEM")
    for files, wanted in (
        ({"ca": str(junk)}, f"ca {junk}: the file has no certificate in PEM format"),
        ({"cert": str(junk), "key": pair.key}, f"cert {junk}: the file has no certificate in PEM format"),
        ({"cert": pair.cert, "key": other.key}, "the key is not this certificate's"),
        ({"cert": pair.cert, "key": str(junk)}, f"key {junk}: the file has no private key in PEM format"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(wanted)):
            Client("127.0.0.1:1", namespace=namespace_of(PART), credentials=Credentials(**files))
    usable = Credentials(ca=authority.ca, cert=pair.cert, key=pair.key)
    with Client("127.0.0.1:1", namespace=namespace_of(PART), credentials=usable) as client:
        assert isinstance(error_of(client, 1.5), NotConnected)


def test_ca_files_that_grpc_accepts_are_accepted(site: Site, tmp_path: Path) -> None:
    """The check accepts a file with a damaged end, and a pipe, which can be read only once."""
    sound = Path(site.authority.ca).read_bytes()
    damaged = tmp_path / "damaged.pem"
    damaged.write_bytes(sound + sound[:200])
    reading, writing = os.pipe()
    os.write(writing, sound)
    os.close(writing)
    try:
        for ca in (str(damaged), f"/dev/fd/{reading}"):
            credentials = Credentials(ca=ca, token=site.tokens.token["acme-far"])
            with Client(site.server.tcp, namespace=namespace_of(PART), credentials=credentials) as client:
                client.wait_until_connected(60)
    finally:
        os.close(reading)


def test_credentials_come_from_the_environment(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`KVTIER_CA` and `KVTIER_TOKEN_FILE` apply to clients and to the command line."""
    file = tmp_path / "token"
    file.write_text(f"{site.tokens.token['acme-far']}\n")
    monkeypatch.setenv("KVTIER_CA", site.authority.ca)
    monkeypatch.setenv("KVTIER_TOKEN_FILE", str(file))
    with Client(site.server.tcp, namespace=namespace_of(PART), timeouts=TIMEOUTS) as client:
        client.wait_until_connected(60)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVTIER_TOKEN_FILE", "~/token")
    with Client(site.server.tcp, namespace=namespace_of(PART), timeouts=TIMEOUTS) as client:
        client.wait_until_connected(60)
    assert "kvt_" not in repr(Credentials.from_environment(token=new_token()))


def test_a_new_certificate_is_in_use_without_a_restart(tmp_path: Path) -> None:
    """The bulk process uses it too; clients stay connected, and a mismatched pair is ignored."""
    site = make_site(tmp_path)
    with site.server.start(), site.client("acme-far") as early:
        wait_for_bulk(early)
        port = early._transport._sockets._streams.target.address[1]  # type: ignore[attr-defined]

        def serials() -> set[int]:
            ports = (
                (site.server.tcp, "h2"),
                (f"127.0.0.1:{port}", CALLS_PROTOCOL),
                (f"127.0.0.1:{port}", STREAMS_PROTOCOL),
            )
            return {peer_serial(address, site.authority.ca, protocol) for address, protocol in ports}

        (first,) = serials()
        key = (tmp_path / "server.key").read_bytes()
        site.authority.issue("other")
        (tmp_path / "server.key").write_bytes((tmp_path / "other.key").read_bytes())
        assert serials() == {first}
        (tmp_path / "server.key").write_bytes(key)
        epoch = early.epoch
        site.authority.issue("server")
        (second,) = serials()
        assert second != first
        with site.client("acme-far") as late:
            wait_for_bulk(late)
            late.store(KEYS, [payload(key, PART) for key in KEYS])
            assert_serves(early, KEYS)
        assert early.epoch == epoch
        wait_until(lambda: "a new certificate cannot be used" in site.server.log)


def test_a_client_continues_if_its_files_are_removed(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot reach the bulk process, logs the reason, and streams through the server."""
    ca = tmp_path / "ca.pem"
    ca.write_bytes(Path(site.authority.ca).read_bytes())
    credentials = Credentials(ca=str(ca), token=site.tokens.token["acme-far"])
    with Client(site.server.tcp, namespace=namespace_of(PART), credentials=credentials, timeouts=TIMEOUTS) as client:
        # `wait_until_connected` would search for the bulk process before the file is removed.
        wait_until(lambda: client.connected)
        ca.unlink()
        client.store(KEYS, [payload(key, PART) for key in KEYS])
        wait_until(lambda: "streams do not use the socket" in caplog.text)
        assert_serves(client, KEYS)


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Returns a server that requires client certificates; some of them have a tenant."""
    directory = tmp_path_factory.mktemp("m")
    made = make_site(directory, tls=f'client_ca = "{directory / "ca.pem"}"')
    with made.tokens.path.open("a") as file:
        for name in ("dns:engine-1", "uri:spiffe://test/engine-2"):
            file.write(f'[[certificates]]\nname = "{name}"\ntenant = "acme"\nroles = ["engine"]\n')
    with made.server.start():
        yield made


class TestMutual:
    """A server that requires client certificates."""

    @staticmethod
    def connect(site: Site, pair: Pair | None, token: str | None = None, tenant: str = "") -> Client:
        shown = {"cert": pair.cert, "key": pair.key} if pair is not None else {}
        namespace = namespace_of(PART, tenant=tenant)
        return Client(site.server.tcp, namespace=namespace, credentials=site.credentials(token, **shown))

    def test_a_certificate_has_its_tenant(self, mutual: Site) -> None:
        """The tenant comes from an alternative name."""
        pairs = [
            mutual.authority.issue("engine-1", dns="engine-1"),
            mutual.authority.issue("two", alternative="spiffe://test/engine-2"),
        ]
        for pair in pairs:
            with self.connect(mutual, pair) as client:
                client.store(KEYS, [payload(key, PART) for key in KEYS])
                assert_serves(client, KEYS)
            with self.connect(mutual, pair, tenant="zeta") as client:
                assert refusal_error(client).reason == "WRONG_TENANT"

    def test_a_certificate_without_an_entry_needs_a_token(self, mutual: Site) -> None:
        """A valid certificate admits the connection; the token then identifies the caller."""
        pair = mutual.authority.issue("stranger")
        with self.connect(mutual, pair) as client:
            assert refusal_error(client).reason == "UNAUTHENTICATED"
        with self.connect(mutual, pair, "zeta-engine") as client:
            client.wait_until_connected(60)

    @pytest.mark.slow
    def test_missing_expired_or_foreign_certificates_are_refused(self, mutual: Site, tmp_path: Path) -> None:
        """The handshake fails, and connected clients are not affected."""
        late = mutual.authority.issue("late", days=(-2, -1))
        foreign = Authority(tmp_path, "foreign").issue("engine-1", dns="engine-1")
        with self.connect(mutual, mutual.authority.issue("engine-1", dns="engine-1")) as bystander:
            bystander.wait_until_connected(60)
            epoch = bystander.epoch
            for pair in (None, late, foreign):
                with self.connect(mutual, pair, "zeta-engine") as client:
                    assert isinstance(error_of(client, 1.5), NotConnected)
            bystander.store(KEYS, [payload(key, PART) for key in KEYS])
            assert_serves(bystander, KEYS)
            assert bystander.epoch == epoch


def test_an_expired_certificate_of_the_server_is_refused_by_clients(tmp_path: Path) -> None:
    """After it is replaced, clients connect without a restart of server or client."""
    site = make_site(tmp_path)
    site.authority.issue("server", days=(-2, -1))
    with site.server.start(), site.client("acme-far") as client:
        assert isinstance(error_of(client, 1.5), NotConnected)
        site.authority.issue("server")
        client.wait_until_connected(60)


def test_an_expired_certificate_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the start and at a replacement; otherwise only clients would see it."""
    authority = Authority(tmp_path)
    for days, wanted in (((-2, -1), "has expired"), ((1, 2), "not yet valid"), ((-1, 1), "")):
        pair = authority.issue("server", days=days)
        caplog.clear()
        server_credentials(pair.cert, pair.key, None)
        assert [pair.cert in text and wanted in text for text in caplog.messages] == ([True] if wanted else [])


UNUSABLE = {
    "missing": "none.pem: No such file or directory",
    "no certificate": "junk.pem: no certificates in PEM format: the file contains no certificate",
    "no key": "server.pem and {0}/junk.pem: the key is not a private key in PEM",
    "another's key": "the key is not this certificate's (KEY_VALUES_MISMATCH)",
    "no authority": "TLS with {0}/junk.pem: no certificates in PEM format",
    "no tokens": "tokens, number 1: name: expected `string`, got `integer`",
}


@pytest.mark.parametrize("what", list(UNUSABLE))
def test_a_server_with_files_that_cannot_be_used_does_not_start(tmp_path: Path, what: str) -> None:
    """The error names the file and the cause."""
    authority = Authority(tmp_path)
    pair, other = authority.issue("server"), authority.issue("other")
    junk = tmp_path / "junk.pem"
    junk.write_text("no PEM")
    (tmp_path / "tokens.toml").write_text("" if what != "no tokens" else "[[tokens]]\nname = 3")
    cert = {"missing": str(tmp_path / "none.pem"), "no certificate": str(junk)}.get(what, pair.cert)
    key = {"another's key": other.key, "no key": str(junk)}.get(what, pair.key)
    client_ca = f'client_ca = "{junk}"\n' if what == "no authority" else ""
    config = tmp_path / "c.toml"
    config.write_text(f'[tls]\ncert = "{cert}"\nkey = "{key}"\n{client_ca}[auth]\ntokens = "{tmp_path}/tokens.toml"')
    assert UNUSABLE[what].format(tmp_path) in refused_start(tmp_path, "--config", str(config))


def test_tcp_without_tls_or_insecure_does_not_start(tmp_path: Path) -> None:
    """The exit code is 78: a retry would not help."""
    with launch(tmp_path, listen="127.0.0.1:0") as server:
        assert server.process.wait(60) == 78


def test_tokens_identify_the_tenant_over_insecure_tcp(tmp_path: Path) -> None:
    """With explicit permission the client sends its token in the clear."""
    site = make_site(tmp_path)
    path = tmp_path / "kvtier.toml"
    text = path.read_text()
    path.write_text("insecure = true\n" + text[: text.index("[tls]")] + text[text.index("[auth]") :])
    token = site.tokens.token["acme-far"]
    with site.server.start():
        with Client(site.server.tcp, namespace=namespace_of(PART)) as client:
            assert refusal_error(client).reason == "UNAUTHENTICATED"
        credentials = Credentials(token=token, insecure=True)
        with Client(site.server.tcp, namespace=namespace_of(PART), credentials=credentials) as client:
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            wait_until(lambda: client._transport._sockets.search(client._transport.session))  # type: ignore[attr-defined]
            assert_serves(client, KEYS)
