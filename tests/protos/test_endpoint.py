"""Parsing of endpoints, and the default endpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.protos.endpoint import (
    MAX_SOCKET_PATH_BYTES,
    Endpoint,
    EndpointError,
    client_endpoint,
    default_endpoint,
    network_of,
    parse_endpoint,
)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("unix:/run/kvtier.sock", Endpoint(path="/run/kvtier.sock")),
        ("unix:///run/kvtier.sock", Endpoint(path="/run/kvtier.sock")),
        ("unix:/a//b", Endpoint(path="/a/b")),
        ("unix:here.sock", Endpoint(path=str(Path.cwd() / "here.sock"))),
        ("unix:~/k.sock", Endpoint(path=str(Path.home() / "k.sock"))),
        ("127.0.0.1:7070", Endpoint(host="127.0.0.1", port=7070)),
        ("node-3.cluster:0", Endpoint(host="node-3.cluster", port=0)),
        ("[::1]:65535", Endpoint(host="::1", port=65535)),
    ],
)
def test_reads(text: str, endpoint: Endpoint) -> None:
    """Each form is parsed, and its text parses to the same endpoint."""
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "neither"),
        ("kvtier.sock", "neither"),
        (":7070", "neither"),
        ("host:", "not a port"),
        ("host:65536", "not a port"),
        ("host:-1", "not a port"),
        ("host:٣", "not a port"),
        ("::1:7070", "brackets"),
        ("[::x]:7070", "not an IPv6 address"),
        ("http://host:7070", "not a host"),
        ("a b:1", "not a host"),
        ("\udcff:1", "not a host"),
        ("unix:", "does not name a socket"),
        ("unix:/run/", "does not name a socket"),
        ("unix://run/kvtier.sock", "unix:///PATH"),
        ("unix:/a\0b", "control character"),
        ("unix:~no-such-user/k", "home directory"),
        ("unix:/" + "x" * MAX_SOCKET_PATH_BYTES, "at most 100 bytes"),
    ],
)
def test_refuses(text: str, why: str) -> None:
    """Other texts are refused with a reason of one line."""
    with pytest.raises(EndpointError, match=why) as refused:
        parse_endpoint(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("unix:/run/k.sock", True),
        ("localhost:1", True),
        ("127.8.0.1:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.7:1", False),
        ("localhost.example.com:1", False),
    ],
)
def test_loopback(text: str, *, loopback: bool) -> None:
    """A host name other than localhost does not count as loopback, even if it resolves to it."""
    assert parse_endpoint(text).is_loopback is loopback


def test_target_is_a_uri() -> None:
    """Any path works, because gRPC unquotes the target."""
    assert parse_endpoint("unix:/run/a%20b?c#d").target == "unix:/run/a%2520b%3Fc%23d"
    assert parse_endpoint("[::1]:7").target == "[::1]:7"


def test_default_endpoint() -> None:
    """The runtime directory; if it is missing or too long, a directory in /tmp with the uid."""
    fallback = Endpoint(path=f"/tmp/kvtier-{os.getuid()}/kvtier.sock")
    assert default_endpoint({"XDG_RUNTIME_DIR": "/run/user/7/"}) == Endpoint(path="/run/user/7/kvtier/kvtier.sock")
    assert default_endpoint({}) == fallback
    assert default_endpoint({"XDG_RUNTIME_DIR": "relative"}) == fallback
    assert default_endpoint({"XDG_RUNTIME_DIR": "/" + "x" * 90}) == fallback


def test_client_endpoint() -> None:
    """The given endpoint, then KVTIER_ENDPOINT, then the default."""
    environ = {"KVTIER_ENDPOINT": "h:1", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert client_endpoint("h:2", environ) == Endpoint(host="h", port=2)
    assert client_endpoint(None, environ) == Endpoint(host="h", port=1)
    assert client_endpoint(None, environ | {"KVTIER_ENDPOINT": ""}) == default_endpoint(environ)
    with pytest.raises(EndpointError, match="KVTIER_ENDPOINT: "):
        client_endpoint(None, {"KVTIER_ENDPOINT": "nonsense"})


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fd00:1:2:3:4::1", "fd00:1:2:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("4711", "4711"),
    ],
)
def test_networks(address: str, network: str) -> None:
    assert network_of(address) == network
