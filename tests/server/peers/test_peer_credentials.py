"""Loads from servers that require TLS, tokens or certificates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.auth_site import KEYS, PART, Site, make_site
from harness.bulk import wait_for_bulk
from harness.certificates import Authority
from harness.payloads import assert_serves, namespace_of, payload
from harness.polling import wait_until

from kvtier.client import Client, SourceOutcome

FOUND, ABSENT, REFUSED = SourceOutcome.FOUND, SourceOutcome.ABSENT, SourceOutcome.REFUSED


@contextlib.contextmanager
def _here(directory: Path, source: Site, settings: str, listed: str = "") -> Iterator[Site]:
    """A server with TLS and tokens, at which `source` may be named."""
    directory.mkdir()
    here = make_site(
        directory, config=f'[peers]\nservers = ["{listed or source.server.tcp}"]\n{settings}\ndeadline = "5s"'
    )
    with here.server.start():
        yield here


def _store(source: Site, who: str = "acme-far", *, credentials: dict[str, str] | None = None) -> None:
    namespace = namespace_of(PART)
    with Client(
        source.server.tcp, namespace=namespace, credentials=source.credentials(who, **credentials or {})
    ) as client:
        client.wait_until_connected(60)
        wait_for_bulk(client)  # the start of this process takes longer than a search may
        client.store(KEYS, [payload(key, PART) for key in KEYS])


def _outcome(here: Site, source: Site, who: str, *, hits: int = 0) -> SourceOutcome:
    """Looks the blocks up as this caller of the server `here`."""
    with here.client(who) as client:
        client.wait_until_connected(60)
        with client.lookup(KEYS, wait=30, source=source.server.tcp) as lease:
            assert lease.prefix_hits == hits
            outcome = lease.source_outcome
        if hits:
            assert_serves(client, KEYS[:hits])
    return outcome


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = make_site(tmp_path_factory.mktemp("b"))
    made.tokens.add("peer", "*", "reader")
    with made.server.start():
        yield made
        assert '"call failed"' not in made.server.log, "a defect, answered with INTERNAL"


def test_a_token_for_all_tenants_gives_each_tenant_its_own_blocks(tmp_path: Path, source: Site) -> None:
    """The source decides by the tenant of the caller here. A wrong token is refused, as a miss."""
    token = tmp_path / "peer.token"
    token.write_text("kvt_wrong")
    settings = f'ca = "{source.authority.ca}"\ntoken_file = "{token}"'
    with _here(tmp_path / "a", source, settings) as here:
        _store(source)
        assert _outcome(here, source, "acme-far") is REFUSED
        token.write_text(source.tokens.token["peer"])  # the server reads the file again
        assert _outcome(here, source, "zeta-engine") is ABSENT
        assert _outcome(here, source, "acme-far", hits=len(KEYS)) is FOUND
        assert source.tokens.token["peer"] not in here.server.log


def test_a_token_of_a_tenant_loads_for_this_tenant_only(tmp_path: Path, source: Site) -> None:
    token = tmp_path / "peer.token"
    token.write_text(source.tokens.token["acme-reader"])
    settings = f'ca = "{source.authority.ca}"\ntoken_file = "{token}"'
    with _here(tmp_path / "a", source, settings) as here:
        _store(source)
        assert _outcome(here, source, "zeta-engine") is REFUSED
        assert _outcome(here, source, "acme-far", hits=len(KEYS)) is FOUND


def test_a_certificate_is_sufficient(tmp_path: Path) -> None:
    """The source maps it to all tenants. When the mapping is removed, the source refuses."""
    (tmp_path / "b").mkdir()
    source = make_site(tmp_path / "b", tls=f'client_ca = "{tmp_path / "b" / "ca.pem"}"')
    pair, engine = source.authority.issue("host-a", dns="host-a"), source.authority.issue("engine")
    tokens = source.tokens.path.read_text()
    source.tokens.path.write_text(
        f'{tokens}\n[[certificates]]\nname = "dns:host-a"\ntenant = "*"\nroles = ["reader"]\n'
    )
    settings = f'ca = "{source.authority.ca}"\ncert = "{pair.cert}"\nkey = "{pair.key}"'
    with source.server.start(), _here(tmp_path / "a", source, settings) as here:
        _store(source, credentials={"cert": engine.cert, "key": engine.key})
        assert _outcome(here, source, "zeta-engine") is ABSENT
        assert _outcome(here, source, "acme-far", hits=len(KEYS)) is FOUND
        source.tokens.path.write_text(tokens)
        wait_until(lambda: _outcome(here, source, "zeta-engine") is REFUSED)


@pytest.mark.parametrize(
    ("fault", "reason"), [("authority", "CERTIFICATE_VERIFY_FAILED"), ("name", "Hostname Verification")]
)
def test_a_source_that_cannot_be_verified_is_not_used(tmp_path: Path, source: Site, fault: str, reason: str) -> None:
    """Its certificate is of another authority, or does not have the listed name."""
    token = tmp_path / "peer.token"
    token.write_text(source.tokens.token["peer"])
    ca = Authority(tmp_path, "other").ca if fault == "authority" else source.authority.ca
    listed = source.server.tcp.replace("127.0.0.1", "localhost") if fault == "name" else source.server.tcp
    _store(source)
    with _here(tmp_path / "a", source, f'ca = "{ca}"\ntoken_file = "{token}"', listed) as here:
        wait_until(lambda: _outcome(here, source, "acme-far") is not SourceOutcome.NOT_LISTED)
        assert _outcome(here, source, "acme-far") is SourceOutcome.UNREACHABLE
        assert reason in here.server.log
