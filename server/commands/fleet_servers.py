"""Servers of a fleet: a list of addresses, a file, or all addresses of a name in DNS."""

from __future__ import annotations

import argparse
import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...protos.endpoint import Endpoint, EndpointError, parse_endpoint

__all__ = ["FleetError", "Lookup", "find_servers"]

_MAX_FILE_BYTES = 1 << 20

Lookup = Callable[..., Sequence[Any]]
"""Resolver of names with the signature and results of `socket.getaddrinfo`."""


class FleetError(ValueError):
    """The servers of the fleet are unknown. The message gives the reason in one line."""


def find_servers(options: argparse.Namespace, lookup: Lookup = socket.getaddrinfo) -> list[Endpoint]:
    """Returns each server once, from --servers, --file or --dns. Raises `FleetError`.

    Servers of a list or file keep their order. Those of a name are sorted by address.
    """
    if options.dns:
        return _resolved(options.dns, lookup)
    if options.file:
        return _parsed(_lines(options.file), f"{options.file}: ")
    return _parsed(text.strip() for text in options.servers.split(","))


def _parsed(texts: Iterable[str], where: str = "") -> list[Endpoint]:
    try:
        endpoints = [parse_endpoint(text) for text in texts if text]
    except EndpointError as error:
        raise FleetError(f"{where}{error}") from None
    if not endpoints:
        raise FleetError(f"{where}no servers are listed")
    if unusable := [endpoint for endpoint in endpoints if not (endpoint.is_unix or endpoint.port)]:
        raise FleetError(f"{where}{unusable[0]}: a server has no port 0")
    return list(dict.fromkeys(endpoints))


def _lines(path: str) -> list[str]:
    """Returns the lines of the file without comments."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise FleetError(f"{path}: the file has more than {_MAX_FILE_BYTES:,} bytes")
        return [line.partition("#")[0].strip() for line in text.decode().splitlines()]
    except OSError as error:
        raise FleetError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FleetError(f"{path}: the file is not text") from None


def _resolved(text: str, lookup: Lookup) -> list[Endpoint]:
    """Returns all IPv4 and IPv6 addresses of NAME:PORT. TLS verifies the name, not the address."""
    [name] = _parsed([text], "--dns: ")
    if name.is_unix:
        raise FleetError(f"--dns: {text!r} is not NAME:PORT")
    try:
        found = {info[4][0] for info in lookup(name.host, name.port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or f"{error}"
        raise FleetError(f"--dns: {name.host} cannot be resolved: {reason}") from None
    if not found:
        raise FleetError(f"--dns: {name.host} has no addresses")
    addresses = sorted(map(ipaddress.ip_address, found), key=lambda address: (address.version, int(address)))
    return [replace(name, host=f"{address}", tls_name=name.host) for address in addresses]
