"""Stores and loads whose outcome is lost: the bulk process ends before it has sent the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness.bulk import ROUTES, Route, fresh, kill_bulk, serving, store_all
from harness.payloads import assert_serves, filled, is_payload, namespace_of, payload
from harness.server_process import MIB

from kvtier.client import Client, StoreStatus
from kvtier.client.transport import socket_streams

PART = 1 * MIB
NAMESPACE = namespace_of(PART)
COUNT = 4


@pytest.fixture(scope="module", params=ROUTES)
def route(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Route]:
    with serving(request.param, tmp_path_factory.mktemp("l"), region=64 * MIB) as route:
        yield route


@pytest.fixture(autouse=True)
def nothing_is_left(route: Route) -> Iterator[None]:
    """Checks after each test that the server has freed all slots."""
    yield
    route.server.wait_for(lambda status: not (status.leases or status.stores or status.quarantined_bytes))


@pytest.fixture
def lose(route: Route, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[bytes]]:
    """Returns a function that makes the answer of the next stream get lost.

    When the server has ended the store or lease, it kills the bulk process and closes the
    connection instead of reading the answer.
    """
    original = socket_streams.read_answer  # type: ignore[attr-defined]

    def lose(*, kill: bool = True) -> list[bytes]:
        lost: list[bytes] = []

        def read(*arguments: Any) -> bytes:
            answer: bytes = original(*arguments)
            if lost:
                return answer
            lost.append(answer)
            route.server.wait_for(lambda status: not (status.leases or status.stores))
            if kill:
                kill_bulk(route.server)
            raise ConnectionResetError("the connection was closed before the answer")

        monkeypatch.setattr(socket_streams, "read_answer", read)
        return lost

    return lose


def test_a_completed_store_whose_answer_is_lost_succeeds(client: Client, lose: Any) -> None:
    """The client asks the server again for the blocks, which are present."""
    keys, lost = fresh("store", COUNT), lose()
    store_all(client, keys)
    assert len(lost) == 1
    assert_serves(client, keys)


def test_a_completed_write_whose_answer_is_lost_succeeds(client: Client, lose: Any) -> None:
    keys, lost = fresh("write", COUNT), lose()
    with client.write(keys) as batch:
        for number, view in zip(batch.wanted, batch.views(), strict=True):
            view[:] = memoryview(payload(keys[number], PART))
    assert len(lost) == 1
    assert_serves(client, keys)


def test_blocks_that_were_evicted_meanwhile_are_stored_again(route: Route, client: Client, lose: Any) -> None:
    """Half of the blocks are gone when the client asks again: it sends only these."""
    keys = fresh("evicted", COUNT)
    store_all(client, keys[:1])
    lost = lose(kill=False)
    original = client._operations._prepare_store  # type: ignore[attr-defined]
    statuses = bytearray()

    def prepare(session: Any, wanted: Any, *rest: Any) -> Any:
        if lost and not statuses:
            with route.client(NAMESPACE) as other:
                other.wait_until_connected(60)
                assert not other.reset(wait=60.0)  # until its end all lookups miss
        answer = yield from original(session, wanted, *rest)
        if lost:
            statuses[:] = answer.statuses
        return answer

    client._operations._prepare_store = prepare  # type: ignore[attr-defined]
    assert list(client.store(keys, [payload(key, PART) for key in keys])) == [
        StoreStatus.PRESENT,
        *[StoreStatus.GRANTED] * (COUNT - 1),
    ]
    assert list(statuses) == [StoreStatus.GRANTED] * (COUNT - 1)
    assert_serves(client, keys[1:])


def test_a_confirmed_load_whose_answer_is_lost_is_repeated(client: Client, lose: Any) -> None:
    """The client cannot know whether the lease was valid to the end, so it loads again."""
    keys = fresh("load", COUNT)
    store_all(client, keys)
    lost = lose()
    buffers = filled(COUNT, PART)
    assert client.load(keys, buffers) == COUNT
    assert len(lost) == 1
    assert all(is_payload(key, found) for key, found in zip(keys, buffers, strict=True))
