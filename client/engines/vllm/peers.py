"""Connections to servers from which blocks are pulled: this engine's own server and `peers`.

A request can name any server in its `kv_transfer_params`, and users can send such requests. An
engine therefore connects only to servers that the engine's settings name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ....protos.endpoint import client_endpoint
from ... import Client, Namespace, Unavailable
from ...handoff import RemoteRequest

__all__ = ["OWN", "NoClient", "Peers", "ServerLink", "address_of"]

OWN = ""
"""This engine's own server in `BlockRead.endpoint` and `Peers`."""

Address = tuple[str, int]


def address_of(endpoint: str | None, advertise: str | None = None) -> Address:
    """Returns the address at which peers reach the server. A Unix socket is `("unix:PATH", 0)`."""
    parsed = client_endpoint(advertise or endpoint)
    return (parsed.host, parsed.port) if parsed.path is None else (f"unix:{parsed.path}", 0)


class NoClient:
    """Stands for the client of an engine whose namespace is not known yet."""

    connected = False
    epoch: int | None = None
    max_keys: int | None = None

    def close(self) -> None:
        """Nothing to close."""


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
        self._allowed = {address_of(endpoint): endpoint for endpoint in allowed}
        self._connect = connect
        self._lock = threading.Lock()
        self._clients = {OWN: own}

    def endpoint_of(self, remote: RemoteRequest) -> str | None:
        """Returns the endpoint of the server that holds `remote`; None if no setting names it.

        A Unix socket always means this engine's own server: a host has one server, and the path of
        the server's socket may differ between containers.
        """
        address = (remote.host, remote.port)
        if address in self._own_addresses or remote.host.startswith("unix:"):
            return OWN
        return self._allowed.get(address)

    def client(self, endpoint: str) -> Client:
        """Returns the client of a server. Raises Unavailable if this worker reads only from OWN."""
        with self._lock:
            client = self._clients.get(endpoint)
            if client is None:
                if self._connect is None:
                    raise Unavailable(f"cannot read from {endpoint}: this worker reads only from its own server")
                client = self._clients[endpoint] = self._connect(endpoint)
            return client

    def close(self) -> None:
        """Ends the sessions with other servers."""
        with self._lock:
            clients = [client for endpoint, client in self._clients.items() if endpoint != OWN]
            self._clients = {OWN: self._clients[OWN]}
        for client in clients:
            client.close()


@dataclass(frozen=True)
class ServerLink:
    """Clients of a scheduler in one namespace."""

    weights_version: str
    namespace: Namespace
    client: Client
    peers: Peers

    def close(self) -> None:
        self.peers.close()
        self.client.close()
