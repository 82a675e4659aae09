"""The client contract over real sockets: all transports, synchronous and asyncio."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from contracts.cache_client import NAMESPACE, SMALL, CacheClientContract, new_keys
from contracts.conversation_client import ConversationClientContract
from harness.bulk import wait_for_bulk
from harness.server_process import MIB, ServerProcess

from kvtier.client import AsyncClient, Client, ConversationClient, InvalidRequest, LookupResult, Unavailable


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory: Path = tmp_path_factory.mktemp("server")
    with ServerProcess(directory, region=256 * MIB, tcp=True).start() as server:
        yield server


class _Blocking:
    """An `AsyncClient` on its own event loop, called like a `Client`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

        async def make() -> AsyncClient:
            return AsyncClient(*args, **kwargs)

        self._client = self._wait(make())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            answer = self._wait(found(*args, **kwargs))
            return _BlockingLease(self, answer) if isinstance(answer, LookupResult) else answer

        return call

    @contextlib.contextmanager
    def _entered(self, context: Any) -> Iterator[Any]:
        batch = self._wait(context.__aenter__())
        try:
            yield batch
        except BaseException as error:
            self._wait(context.__aexit__(type(error), error, error.__traceback__))
            raise
        self._wait(context.__aexit__(None, None, None))

    def read(self, lease: Any, items: Any, **options: Any) -> Any:
        return self._entered(self._client.read(lease if isinstance(lease, int) else lease.found, items, **options))

    def write(self, keys: Any, **options: Any) -> Any:
        return self._entered(self._client.write(keys, **options))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result(60)


class _BlockingLease:
    def __init__(self, client: _Blocking, found: Any) -> None:
        self._client = client
        self.found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.found, name)

    def release(self) -> None:
        self._client._wait(self.found.release())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


WAYS: dict[str, tuple[Callable[..., Any], str, bool]] = {
    "shared memory": (Client, "shm", False),
    "gRPC": (Client, "grpc", False),
    "Unix socket": (Client, "tcp", False),
    "TCP": (Client, "tcp", True),
    "asyncio, shared memory": (_Blocking, "shm", False),
    "asyncio, gRPC": (_Blocking, "grpc", False),
    "asyncio, TCP": (_Blocking, "tcp", True),
}
"""Client, transport, and whether it connects over TCP."""


class TestClients(CacheClientContract, ConversationClientContract):
    @pytest.fixture(params=WAYS)
    def connect(self, request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Callable[..., Any]]:
        make, transport, remote = WAYS[request.param]
        clients: list[Any] = []

        def connect(namespace: Any, **kwargs: Any) -> Any:
            endpoint = server.tcp if remote else server.endpoint
            client = make(endpoint, namespace=namespace, transport=transport, **kwargs)
            clients.append(client)
            client.wait_until_connected()
            if transport == "tcp":  # sockets are discovered in the background
                wait_for_bulk(getattr(client, "_client", client))
            assert client.transport == transport
            return client

        yield connect
        for client in clients:
            client.close()
        # The server notices the end a moment after the client.
        status = server.wait_for(lambda status: not status.sessions)
        assert (status.leases, status.stores, status.holds, len(status.sessions)) == (0, 0, 0, 0)

    @pytest.fixture
    def agent(self, server: ServerProcess) -> Iterator[ConversationClient]:
        with ConversationClient(server.endpoint, timeout=60) as agent:
            yield agent


def test_a_client_without_a_server_fails_at_once(tmp_path: Path) -> None:
    """The constructor neither blocks nor raises; calls raise `Unavailable`."""
    with Client(f"unix:{tmp_path}/absent", namespace=NAMESPACE) as client:
        assert not client.connected
        with pytest.raises(Unavailable):
            client.lookup(new_keys(1))
        with pytest.raises(Unavailable):
            client.store(new_keys(1), [bytes(SMALL)])


def test_an_invalid_endpoint_is_refused() -> None:
    """It is an error, not a disconnected server."""
    with pytest.raises(InvalidRequest):
        Client("nowhere", namespace=NAMESPACE)


def test_a_closed_client_raises(server: ServerProcess) -> None:
    """Closing twice has no effect."""
    client = Client(server.endpoint, namespace=NAMESPACE)
    client.wait_until_connected()
    client.close()
    client.close()
    with pytest.raises(Unavailable):
        client.lookup(new_keys(1))
