"""The servers that hold what is pulled: this engine's own, and those on other hosts that its settings name.

Parameters of requests say where to pull from, and come from outside: an engine connects to no server that its settings do not name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from ....protos.endpoint import Endpoint, client_endpoint
from ... import Client, Unavailable
from ...handoff import RemoteRequest

__all__ = ["OWN", "Peers", "address_of"]

OWN = ""
"""How ``BlockRead.endpoint`` and Peers name this engine's own server."""

Address = tuple[str, int]


def address_of(endpoint: str | None, advertise: str | None = None) -> Address:
    """Returns what peers are told of the server at ``endpoint``: ``advertise`` if given; a Unix socket is ("unix:PATH", 0)."""
    return _address(client_endpoint(advertise or endpoint))


class Peers:
    """Connects to each server once, when it is needed first. Any thread."""

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
        """Returns where ``remote`` is held; None for a server that the settings do not name.

        A Unix socket is one of this host, which has one server, whatever it is called in somebody's container.
        """
        address = (remote.host, remote.port)
        if address in self._own_addresses or remote.host.startswith("unix:"):
            return OWN
        return self._allowed.get(address)

    def client(self, endpoint: str) -> Client:
        """Returns the client of a server; it may not be connected yet. Raises Unavailable where there is no way to others."""
        with self._lock:
            client = self._clients.get(endpoint)
            if client is None:
                if self._connect is None:
                    raise Unavailable(f"this worker reads from no other server, and so not from {endpoint}")
                client = self._clients[endpoint] = self._connect(endpoint)
            return client

    def close(self) -> None:
        """End the sessions with other servers."""
        with self._lock:
            clients = [client for endpoint, client in self._clients.items() if endpoint != OWN]
            self._clients = {OWN: self._clients[OWN]}
        for client in clients:
            client.close()


def _address(endpoint: Endpoint) -> Address:
    if endpoint.path is not None:
        return f"unix:{endpoint.path}", 0
    return endpoint.host, endpoint.port
