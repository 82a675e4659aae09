"""Connections to the servers that blocks are pulled from: this engine's own and those in `peers`.

The parameters of requests name servers and come from outside. An engine therefore connects only to
servers that its settings name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from ....protos.endpoint import Endpoint, client_endpoint
from ... import Client, Unavailable
from ...handoff import RemoteRequest

__all__ = ["OWN", "Peers", "address_of"]

OWN = ""
"""This engine's own server in `BlockRead.endpoint` and `Peers`."""

Address = tuple[str, int]


def address_of(endpoint: str | None, advertise: str | None = None) -> Address:
    """Returns the address of the server for peers. A Unix socket is `("unix:PATH", 0)`."""
    return _address(client_endpoint(advertise or endpoint))


class Peers:
    """Clients by endpoint, each connected when it is first needed. Thread-safe."""

    def __init__(
        self,
        own: Client,
        own_addresses: Collection[Address] = (),
        allowed: Collection[str] = (),
        connect: Callable[[str], Client] | None = None,
    ) -> None:
        self._own_addresses = frozenset(own_addresses)
        self._allowed = {_address(client_endpoint(endpoint)): endpoint for endpoint in allowed}
        self._connect = connect
        self._lock = threading.Lock()
        self._clients = {OWN: own}

    def endpoint_of(self, remote: RemoteRequest) -> str | None:
        """Returns the endpoint that holds `remote`, or None if the settings do not name it.

        A Unix socket is on this host, which has one server; containers may see it at other paths.
        """
        address = (remote.host, remote.port)
        if address in self._own_addresses or remote.host.startswith("unix:"):
            return OWN
        return self._allowed.get(address)

    def client(self, endpoint: str) -> Client:
        """Returns the server's client. Raises Unavailable if this worker connects to no others."""
        with self._lock:
            client = self._clients.get(endpoint)
            if client is None:
                if self._connect is None:
                    raise Unavailable(f"this worker reads from no other server, and so not from {endpoint}")
                client = self._clients[endpoint] = self._connect(endpoint)
            return client

    def close(self) -> None:
        """Ends the sessions with other servers."""
        with self._lock:
            clients = [client for endpoint, client in self._clients.items() if endpoint != OWN]
            self._clients = {OWN: self._clients[OWN]}
        for client in clients:
            client.close()


def _address(endpoint: Endpoint) -> Address:
    if endpoint.path is not None:
        return f"unix:{endpoint.path}", 0
    return endpoint.host, endpoint.port
