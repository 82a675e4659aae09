"""TLS and mTLS on TCP: who is let in, with which certificate, and what happens when that is replaced."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from harness.bulk import wait_for_bulk
from harness.certificates import Authority, Pair
from harness.launch import launch, refused_start
from harness.long_timeouts import wait_until
from harness.payloads import assert_serves, namespace_of, payload
from harness.trust_site import KEYS, PART, TIMEOUTS, Site, error_of, make_site, why_refused

from kvtier.client import AsyncClient, Client, Credentials, InvalidRequest, NotConnected
from kvtier.server.auth.tls import server_credentials
from kvtier.server.auth.tokens import new_token


def peer_serial(address: str, ca: str) -> int:
    """Returns the number of the certificate that a server shows."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), 5) as plain,
        context.wrap_socket(plain, server_hostname=host) as tls,
    ):
        shown = tls.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def test_blocks_travel_over_tls_through_the_bulk_process(site: Site) -> None:
    """A client with the server's CA and a token stores and loads; streams go to the bulk process over TLS, never in the clear."""
    with site.client("acme-far") as client:
        client.wait_until_connected(60)
        assert client.transport == "grpc"
        wait_for_bulk(client)
        client.store(KEYS, [payload(key, PART) for key in KEYS])
        assert_serves(client, KEYS)
        streams = client._wire._bulk._streams  # type: ignore[attr-defined]
        assert type(streams).__name__ == "Streams"


async def test_the_asyncio_client_too(site: Site) -> None:
    """The same credentials, for asyncio."""
    namespace = namespace_of(PART, model="aio")
    credentials = site.credentials("acme-far")
    async with AsyncClient(site.server.tcp, namespace=namespace, credentials=credentials, timeouts=TIMEOUTS) as client:
        await client.wait_until_connected(60)
        await client.store(KEYS, [payload(key, PART) for key in KEYS])
        buffers = [payload(key, PART) * 0 for key in KEYS]
        assert await client.load(KEYS, buffers, wait=30) == len(KEYS)
        assert all((found == payload(key, PART)).all() for key, found in zip(KEYS, buffers, strict=True))


def test_a_client_that_trusts_somebody_else_does_not_connect(site: Site, tmp_path: Path) -> None:
    """The server's certificate is verified: of another authority, or in the clear, there is no connection."""
    other = Authority(tmp_path, "other")
    token = site.tokens.token["acme-far"]
    for credentials in (Credentials(ca=other.ca, token=token), Credentials(token=token, insecure=True)):
        with Client(site.server.tcp, namespace=namespace_of(PART), credentials=credentials) as client:
            assert isinstance(error_of(client), NotConnected)


def test_a_token_is_not_sent_in_the_clear() -> None:
    """Over TCP without TLS a token stays at home, unless somebody has said that it may go; a key goes with its certificate."""
    with pytest.raises(InvalidRequest, match=r"is not sent to 127\.0\.0\.1:1 in the clear"):
        Client("127.0.0.1:1", namespace=namespace_of(PART), credentials=Credentials(token=new_token()))
    with pytest.raises(InvalidRequest, match="goes with its key"):
        Client("127.0.0.1:1", namespace=namespace_of(PART), credentials=Credentials(cert="/c.pem"))
    with pytest.raises(InvalidRequest, match=r"ca /nowhere/ca\.pem: No such file"):
        Client("127.0.0.1:1", namespace=namespace_of(PART), credentials=Credentials(ca="/nowhere/ca.pem"))


def test_files_that_cannot_be_used_are_not_a_server_that_is_gone(tmp_path: Path) -> None:
    """To gRPC a key that is another certificate's, and authorities that are none, are a connection that was refused."""
    authority = Authority(tmp_path)
    pair, other = authority.issue("engine-1"), authority.issue("engine-2")
    junk = tmp_path / "junk.pem"
    junk.write_text("no PEM")
    for files, wanted in (
        ({"ca": str(junk)}, f"ca {junk}: there is no certificate in PEM in it"),
        ({"cert": str(junk), "key": pair.key}, f"cert {junk}: there is no certificate in PEM in it"),
        ({"cert": pair.cert, "key": other.key}, "the key is not this certificate's"),
        ({"cert": pair.cert, "key": str(junk)}, f"key {junk}: there is no private key in PEM in it"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(wanted)):
            Client("127.0.0.1:1", namespace=namespace_of(PART), credentials=Credentials(**files))
    usable = Credentials(ca=authority.ca, cert=pair.cert, key=pair.key)
    with Client("127.0.0.1:1", namespace=namespace_of(PART), credentials=usable) as client:
        assert isinstance(error_of(client, 1.5), NotConnected)


def test_authorities_that_grpc_can_use_are_used(site: Site, tmp_path: Path) -> None:
    """A file whose end is damaged, and a pipe, which can be read once: a look at them is no reason to refuse them."""
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


def test_the_environment_has_credentials(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`KVTIER_CA` and `KVTIER_TOKEN_FILE`, for clients and for the command line."""
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
    """For the server and its bulk process; a pair that does not belong together leaves the old one; clients stay connected."""
    site = make_site(tmp_path)
    with site.server.start(), site.client("acme-far") as early:
        early.wait_until_connected(60)
        wait_for_bulk(early)
        bulk = early._wire._bulk._streams  # type: ignore[attr-defined]
        assert bulk is not None
        first = peer_serial(site.server.tcp, site.authority.ca)
        key = (tmp_path / "server.key").read_bytes()
        site.authority.issue("other")
        (tmp_path / "server.key").write_bytes((tmp_path / "other.key").read_bytes())
        assert peer_serial(site.server.tcp, site.authority.ca) == first
        (tmp_path / "server.key").write_bytes(key)
        epoch = early.epoch
        site.authority.issue("server")
        second = peer_serial(site.server.tcp, site.authority.ca)
        assert second != first
        with site.client("acme-far") as late:
            late.wait_until_connected(60)
            wait_for_bulk(late)
            late.store(KEYS, [payload(key, PART) for key in KEYS])
            assert_serves(early, KEYS)
        assert early.epoch == epoch
        wait_until(lambda: "a new certificate cannot be used" in site.server.log)


def test_a_client_whose_files_have_gone_goes_on(site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It does not find the bulk process, which takes a channel of its own, and says why; streams go through the server."""
    ca = tmp_path / "ca.pem"
    ca.write_bytes(Path(site.authority.ca).read_bytes())
    credentials = Credentials(ca=str(ca), token=site.tokens.token["acme-far"])
    with Client(site.server.tcp, namespace=namespace_of(PART), credentials=credentials, timeouts=TIMEOUTS) as client:
        # `wait_until_connected` would have it look for the bulk process at once, and the file would be gone too late.
        wait_until(lambda: client.connected)
        ca.unlink()
        client.store(KEYS, [payload(key, PART) for key in KEYS])
        wait_until(lambda: "streams do not go to the bulk process" in caplog.text)
        assert_serves(client, KEYS)


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that wants certificates of its authority, some of which have a tenant."""
    directory = tmp_path_factory.mktemp("m")
    made = make_site(directory, tls=f'client_ca = "{directory / "ca.pem"}"')
    with made.tokens.path.open("a") as file:
        for name in ("engine-1", "spiffe://test/engine-2"):
            file.write(f'[[certificates]]\nname = "{name}"\ntenant = "acme"\nroles = ["engine"]\n')
    with made.server.start():
        yield made


class TestMutual:
    """Clients need a certificate."""

    @staticmethod
    def connect(site: Site, pair: Pair | None, token: str | None = None, tenant: str = "") -> Client:
        """Returns a client that shows this certificate."""
        shown = {"cert": pair.cert, "key": pair.key} if pair is not None else {}
        namespace = namespace_of(PART, tenant=tenant)
        return Client(site.server.tcp, namespace=namespace, credentials=site.credentials(token, **shown))

    def test_a_certificate_has_its_tenant(self, mutual: Site) -> None:
        """By its common name, or a name in its subject's alternatives."""
        pairs = [
            mutual.authority.issue("engine-1"),
            mutual.authority.issue("two", alternative="spiffe://test/engine-2"),
        ]
        for pair in pairs:
            with self.connect(mutual, pair) as client:
                client.wait_until_connected(60)
                client.store(KEYS, [payload(key, PART) for key in KEYS])
                assert_serves(client, KEYS)
            with self.connect(mutual, pair, tenant="zeta") as client:
                assert why_refused(client).reason == "WRONG_TENANT"

    def test_one_that_is_nobodys_needs_a_token(self, mutual: Site) -> None:
        """A certificate lets in; who it is, a token may say as well."""
        pair = mutual.authority.issue("stranger")
        with self.connect(mutual, pair) as client:
            assert why_refused(client).reason == "UNAUTHENTICATED"
        with self.connect(mutual, pair, "zeta-engine") as client:
            client.wait_until_connected(60)

    def test_none_or_an_expired_or_another_authoritys_does_not_connect(self, mutual: Site, tmp_path: Path) -> None:
        """The handshake ends; those that are in notice nothing."""
        late = mutual.authority.issue("late", days=(-2, -1))
        foreign = Authority(tmp_path, "foreign").issue("engine-1")
        with self.connect(mutual, mutual.authority.issue("engine-1")) as bystander:
            bystander.wait_until_connected(60)
            epoch = bystander.epoch
            for pair in (None, late, foreign):
                with self.connect(mutual, pair, "zeta-engine") as client:
                    assert isinstance(error_of(client, 1.5), NotConnected)
            bystander.store(KEYS, [payload(key, PART) for key in KEYS])
            assert_serves(bystander, KEYS)
            assert bystander.epoch == epoch


def test_an_expired_certificate_of_the_server_is_refused_by_clients(tmp_path: Path) -> None:
    """And one in its place is found without a restart of either."""
    site = make_site(tmp_path)
    site.authority.issue("server", days=(-2, -1))
    with site.server.start(), site.client("acme-far") as client:
        assert isinstance(error_of(client, 1.5), NotConnected)
        site.authority.issue("server")
        client.wait_until_connected(60)


def test_a_certificate_that_is_out_of_date_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, and when it replaces one that is not: only clients would notice else."""
    authority = Authority(tmp_path)
    for days, wanted in (((-2, -1), "has expired"), ((1, 2), "not yet valid"), ((-1, 1), "")):
        pair = authority.issue("server", days=days)
        caplog.clear()
        server_credentials(pair.cert, pair.key, None)
        assert [pair.cert in text and wanted in text for text in caplog.messages] == ([True] if wanted else [])


UNUSABLE = {
    "missing": "none.pem: No such file or directory",
    "no certificate": "junk.pem: not certificates in PEM: there is none in it",
    "no key": "server.pem and {0}/junk.pem: the key is not a private key in PEM",
    "another's key": "the key is not this certificate's (KEY_VALUES_MISMATCH)",
    "no authority": "TLS with {0}/junk.pem: not certificates in PEM",
    "no tokens": "tokens, number 1: name: expected `string`, got `integer`",
}


@pytest.mark.parametrize("what", list(UNUSABLE))
def test_a_server_with_files_that_cannot_be_used_does_not_start(tmp_path: Path, what: str) -> None:
    """It says which, and why."""
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


def test_without_tls_or_insecure_it_does_not_start(tmp_path: Path) -> None:
    """Exit code 78: trying again will not help."""
    with launch(tmp_path, listen="127.0.0.1:0") as server:
        assert server.process.wait(60) == 78


def test_where_it_is_insecure_tokens_still_count(tmp_path: Path) -> None:
    """In the clear, with a token that its holder lets go: the tenant is still the token's."""
    site = make_site(tmp_path)
    path = tmp_path / "kvtier.toml"
    text = path.read_text()
    path.write_text("insecure = true\n" + text[: text.index("[tls]")] + text[text.index("[auth]") :])
    token = site.tokens.token["acme-far"]
    with site.server.start():
        with Client(site.server.tcp, namespace=namespace_of(PART)) as client:
            assert why_refused(client).reason == "UNAUTHENTICATED"
        credentials = Credentials(token=token, insecure=True)
        with Client(site.server.tcp, namespace=namespace_of(PART), credentials=credentials) as client:
            client.wait_until_connected(60)
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            wait_until(lambda: client._wire._bulk.streams(client._wire.link))  # type: ignore[attr-defined]
            assert_serves(client, KEYS)
