"""Endpoints: text form, parser and default of the server's address; networks of peers.

An endpoint is `unix:PATH` or `HOST:PORT`. The default for server and clients is
`$XDG_RUNTIME_DIR/kvtier/kvtier.sock`, or `/tmp/kvtier-<uid>/kvtier.sock` if that variable is not
usable. In clients `KVTIER_ENDPOINT` overrides the default.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

__all__ = [
    "CREDENTIAL_VARIABLES",
    "ENDPOINT_VARIABLE",
    "MAX_SOCKET_PATH_BYTES",
    "Endpoint",
    "EndpointError",
    "client_endpoint",
    "default_endpoint",
    "network_of",
    "parse_endpoint",
]

_IPV6_NETWORK_BYTES = 8
_IPV4_MAPPED = bytes(10) + b"\xff\xff"

ENDPOINT_VARIABLE = "KVTIER_ENDPOINT"
"""Environment variable with the server's endpoint, for clients."""

CREDENTIAL_VARIABLES = {
    "ca": "KVTIER_CA",
    "cert": "KVTIER_CERT",
    "key": "KVTIER_KEY",
    "token": "KVTIER_TOKEN",
    "token_file": "KVTIER_TOKEN_FILE",
    "insecure": "KVTIER_INSECURE",
}
"""Environment variable of each field of `Credentials`. The server reads `KVTIER_INSECURE` too."""

MAX_SOCKET_PATH_BYTES = 100
"""Longest path of a server's socket. The kernel allows 107 bytes (unix(7)). 7 bytes are reserved
for the suffix of the server's other sockets, such as the attach socket."""

_MAX_PORT = 65535
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # a tab is harmless


class EndpointError(ValueError):
    """A text that is not an endpoint. The message gives the reason in one line."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A Unix socket (`path`) or a TCP address (`host` and `port`)."""

    path: str | None = None
    host: str = ""
    port: int = 0
    tls_name: str = ""
    """Name that the server's certificate must have for gRPC; empty means `host`."""

    @property
    def is_unix(self) -> bool:
        return self.path is not None

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can connect: a Unix socket, or TCP on a loopback address."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def target(self) -> str:
        """Target for gRPC. A target is a URI, so `%`, `?` and `#` in a path are quoted."""
        return str(self) if self.path is None else f"unix:{quote(os.fsencode(self.path))}"

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Parses `unix:PATH` or `HOST:PORT`. Raises `EndpointError`.

    Also accepts `unix:///PATH`, `unix:~/PATH`, relative paths and IPv6 addresses in brackets. The
    path of the result is absolute. With port 0 a server chooses a free port.
    """
    if _CONTROL.search(text):
        raise EndpointError(f"{text!r} contains a control character")
    if text.startswith("unix:"):
        return Endpoint(path=_socket_path(text))
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise EndpointError(f"{text!r} is neither unix:PATH nor HOST:PORT")
    if not (port.isascii() and port.isdigit() and int(port) <= _MAX_PORT):
        raise EndpointError(f"{text!r}: {port!r} is not a port (0 to {_MAX_PORT})")
    return Endpoint(host=_host(host, text), port=int(port))


def default_endpoint(environ: Mapping[str, str] = os.environ) -> Endpoint:
    """Returns the default Unix socket of this user."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    path = f"{runtime}/kvtier/kvtier.sock"
    if not runtime.startswith("/") or len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        path = f"/tmp/kvtier-{os.getuid()}/kvtier.sock"  # noqa: S108 - the server checks who owns the directory
    return Endpoint(path=str(Path(path)))


def client_endpoint(text: str | None = None, environ: Mapping[str, str] = os.environ) -> Endpoint:
    """Returns `text`, `KVTIER_ENDPOINT` or the default, in this order. Raises `EndpointError`.

    Blanks around the value of the variable are ignored: it may come from a file with a line end.
    """
    if text:
        return parse_endpoint(text)
    if from_environment := environ.get(ENDPOINT_VARIABLE, "").strip():
        try:
            return parse_endpoint(from_environment)
        except EndpointError as error:
            raise EndpointError(f"{ENDPOINT_VARIABLE}: {error}") from None
    return default_endpoint(environ)


def _socket_path(text: str) -> str:
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        # The URI form has an empty authority. In unix://NAME/PATH, NAME would be a host.
        if not path.startswith("///"):
            raise EndpointError(f"{text!r}: write unix:PATH or unix:///PATH")
        path = path[2:]
    if not path or path.endswith("/"):
        raise EndpointError(f"{text!r} does not name a socket")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise EndpointError(f"{text!r}: the path of a socket must be UTF-8, because messages contain it") from None
    try:
        path = str(Path(path).expanduser().absolute())
    except RuntimeError as error:  # ~ of an unknown user
        raise EndpointError(f"{text!r}: {error}") from None
    if (length := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
        raise EndpointError(f"{text!r}: the path must have at most {MAX_SOCKET_PATH_BYTES} bytes; it has {length}")
    return path


def network_of(address: str) -> str:
    """Returns what a peer's address counts as: for IPv6 its /64, of which one host may have all."""
    try:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    except OSError:  # IPv4, or not an IP address
        return address
    if packed.startswith(_IPV4_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[-4:])
    return socket.inet_ntop(socket.AF_INET6, packed[:_IPV6_NETWORK_BYTES] + bytes(8)) + "/64"


def _host(host: str, text: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise EndpointError(f"{text!r}: {host!r} is not an IPv6 address") from None
        return host
    if ":" in host or not host.isprintable() or any(char.isspace() or char in "/[]" for char in host):
        raise EndpointError(f"{text!r}: {host!r} is not a host (write IPv6 addresses in brackets)")
    return host
