"""The scheduler's connector of an engine, over a client without a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from connector_fakes import FakeClient, await_namespace

from kvtier.client import Namespace
from kvtier.client.engines.vllm import KVTierConnector

__all__ = ["MakeConnector", "Server", "server_of"]

MakeConnector: TypeAlias = Callable[..., KVTierConnector]
"""Arguments: the engine's configuration and, if not one group of full attention, its KV cache."""


class Server(FakeClient):
    """A client that is connected at once. The other attributes are what the connector passed."""

    transport, engine_id = "none", "engine"

    def __init__(self, endpoint: str | None, *, namespace: Namespace, **options: Any) -> None:
        super().__init__()
        self.endpoint, self.namespace, self.given = endpoint, namespace, options

    def wait_until_connected(self, _: float) -> None:
        pass


def server_of(made: KVTierConnector) -> Server:
    assert made._scheduler is not None, "the connector is disabled"
    await_namespace(made)
    client: Any = made._scheduler._client
    return client  # type: ignore[no-any-return]
