from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contracts.cache_client import NAMESPACE, SMALL, CacheClientContract, new_keys
from contracts.conversation_client import ConversationClientContract

from kvtier.client import (
    Client,
    ConversationAction,
    ConversationClient,
    DeadlineExceeded,
    HoldGone,
    HoldName,
    NotConnected,
    PublishStatus,
    SessionLost,
    make_hold_key,
)
from kvtier.client.testing import FakeServer


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


class TestFakeServer(CacheClientContract, ConversationClientContract):
    """The fake server passes the client contract."""

    @pytest.fixture
    def connect(self, server: FakeServer) -> Iterator[Callable[..., Client]]:
        clients: list[Client] = []

        def connect(*args: object, **kwargs: object) -> Client:
            clients.append(server.client(*args, **kwargs))  # type: ignore[arg-type]
            return clients[-1]

        yield connect
        for client in clients:
            client.close()
        assert not server._sessions

    @pytest.fixture
    def agent(self, server: FakeServer) -> Iterator[ConversationClient]:
        with server.conversation_client() as agent:
            yield agent


def test_calls_fail_while_the_server_is_down(server: FakeServer) -> None:
    """Users can test their code without a server."""
    client = server.client(NAMESPACE)
    keys = new_keys(1)
    client.store(keys, [b"x" * SMALL])
    server.down = True
    assert not client.connected
    with pytest.raises(NotConnected):
        client.lookup(keys)
    server.down = False
    assert client.load(keys, [bytearray(SMALL)]) == 1


def test_calls_to_a_hanging_server_time_out(server: FakeServer) -> None:
    """No call waits forever."""
    client = server.client(NAMESPACE)
    server.hanging = True
    with pytest.raises(DeadlineExceeded):
        client.lookup(new_keys(1))


def test_a_restart_ends_leases_and_keeps_blocks(server: FakeServer) -> None:
    """A load that began before the restart fails; the next one works."""
    client = server.client(NAMESPACE)
    keys = new_keys(1)
    client.store(keys, [b"x" * SMALL])
    lease = client.lookup(keys)
    with pytest.raises(SessionLost), client.read(lease, [0]):
        server.restart()
    assert client.load(keys, [bytearray(SMALL)]) == 1
    server.forget()
    assert client.lookup(keys).id == 0


def test_tests_can_end_holds(server: FakeServer) -> None:
    """Users can test holds that are declined, expired, or lost in a restart."""
    client = server.client(NAMESPACE, engine_id="e")
    keys, hold = new_keys(1), HoldName("e", "r")
    client.store(keys, [b"x" * SMALL])
    partial = make_hold_key("e", "r", 0, 1)
    client.store([partial], [b"x" * SMALL])
    server.decline_holds()
    assert client.publish("r", [*keys, partial], [0, 1], num_tokens=20).status is PublishStatus.NO_ROOM
    with client.lookup([*keys, partial]) as lease:
        assert lease.prefix_hits == 1, "a declined hold's own blocks are removed"
    server.decline_holds(False)
    client.publish("r", keys, [0], num_tokens=16)
    server.forget()
    client.claim(hold).release()
    server.expire_holds()
    with pytest.raises(HoldGone) as gone:
        client.claim(hold)
    assert gone.value.reason == "HOLD_EXPIRED"
    server.forget()
    assert client.lookup(keys).id == 0
    client.publish("r", keys, [0], num_tokens=16)
    server.restart()
    with pytest.raises(HoldGone):
        client.claim(hold)


def test_retained_blocks_stay_until_a_test_ends_the_retention(server: FakeServer) -> None:
    """Users can test agents that retain blocks. A restart forgets the conversations."""
    client, keys = server.client(NAMESPACE), new_keys(2)
    client.begin_request("r", keys, conversation_id="c")
    client.store(keys, [b"x" * SMALL] * 2, request_id="r")
    with server.conversation_client() as agent:
        agent.act(ConversationAction.RETAIN, "c", retain_for=60)
        server.forget()
        assert client.load(keys, [bytearray(SMALL)] * 2) == 2
        server.end_retention()
        server.forget()
        assert client.lookup(keys).id == 0
        assert agent.act(ConversationAction.RETAIN, "c", retain_for=60).missing == 2
        server.down = True
        with pytest.raises(NotConnected):
            agent.list()
        server.down = False
        server.restart()
        assert agent.list().total == 0


@pytest.mark.parametrize("what", ["store", "load"])
def test_streams_that_break_again_and_again_lose_the_connection(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each stream breaks after its store or lease has ended: the caller did not lose a lease."""
    client = server.client(NAMESPACE)
    keys = new_keys(1)
    client.store(keys, [b"x" * SMALL])
    broken = []

    def break_it(*_: object) -> None:
        broken.append(1)
        server._stores.clear()
        server._leases.clear()
        raise NotConnected("the connection of a stream failed")

    original = server._handle

    def handle(method: str, request: Any) -> Any:
        if method == "TransferService/Locate":
            server._store(server._session(request.session), request.store_id)
        return original(method, request)

    monkeypatch.setattr(server, "_handle", handle)
    monkeypatch.setattr(server, "_push", break_it)
    monkeypatch.setattr(server, "_pull", break_it)
    move = {
        "store": lambda: client.store(new_keys(1), [b"y" * SMALL]),
        "load": lambda: client.load(keys, [bytearray(SMALL)]),
    }
    with pytest.raises(NotConnected):
        move[what]()
    assert len(broken) == 3
