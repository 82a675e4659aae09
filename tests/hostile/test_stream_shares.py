"""Attacks on the bulk process, which serves the streams of all tenants."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

import grpc
import pytest
from harness.auth_site import Site
from harness.bulk import Route, bulk_pid, fresh, prepare, pull_call, push_call, tls_route, wait_for_bulk
from harness.payloads import assert_serves, namespace_of, payload
from harness.polling import wait_until
from harness.raw import RawSession, RawSocket

from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import Purpose, pack_data_head

PART = 64 << 10
STALLED = 140
SECONDS = 15.0
"""The server ends a stalled stream after 30 s."""


@pytest.fixture
def attacker(site: Site) -> Route:
    return tls_route(site, "acme-far")


@pytest.fixture
def session(attacker: Route) -> Iterator[RawSession]:
    with attacker.session(namespace_of(PART, tenant="acme"), "attacker") as session:
        yield session


def assert_streams(site: Site, salt: str) -> None:
    """A client of another tenant stores and loads through the bulk process, whose pid stays."""
    pid = bulk_pid(site.server.pid)
    keys = fresh(salt, 4)
    with tls_route(site, "zeta-engine").client(namespace_of(PART, tenant="zeta")) as client:
        client.wait_until_connected(60)
        wait_for_bulk(client, SECONDS)
        client.store(keys, [payload(key, PART) for key in keys])
        assert_serves(client, keys)
        assert client.transport == "tcp"
    assert bulk_pid(site.server.pid) == pid


def open_many(attacker: Route, session: RawSession, opened: contextlib.ExitStack) -> list[RawSocket]:
    """Opens more connections than there are places, as far as the server accepts them."""
    connections = []
    for _ in range(STALLED):
        connection = opened.enter_context(attacker.dial(session, Purpose.STREAMS))
        with contextlib.suppress(OSError, EOFError):
            if connection.answer() == (0, b""):
                connections.append(connection)
    return connections


@pytest.mark.parametrize("kind", ["idle", "push", "pull"])
def test_connections_of_a_tenant_give_way(site: Site, attacker: Route, session: RawSession, kind: str) -> None:
    """A tenant holds all connections, idle or with stalled streams. Another one streams."""
    store_id = prepare(session, fresh(f"held {kind}", 1))
    keys = fresh(f"stored {kind}", 1)
    with attacker.client(namespace_of(PART, tenant="acme")) as client:
        client.wait_until_connected(60)
        client.store(keys, [bytes(PART)])
    lookup = cache_pb2.LookupRequest(session=session.ref, keys=pack_keys(keys))
    lease_id = session.cache.Lookup(lookup, timeout=60).lease_id
    assert lease_id
    with contextlib.ExitStack() as opened:
        for connection in open_many(attacker, session, opened):
            with contextlib.suppress(OSError):
                if kind == "push":
                    connection.send(push_call(store_id), pack_data_head(1, 0, PART, 0), b"x")
                elif kind == "pull":
                    connection.send(pull_call(lease_id, [0] * 1024))
        assert_streams(site, f"beside {kind}")


def test_stalled_streams_end_no_stream_of_others(site: Site, attacker: Route, session: RawSession) -> None:
    """An engine ends its stores while their streams are stalled, again and again.

    The bulk process is not killed, and other tenants stream meanwhile.
    """
    keys = map(lambda number: fresh(f"stalled {number}", 1), itertools.count())  # noqa: C417 - is infinite
    ended = threading.Event()
    defects: list[Exception] = []

    def attack() -> None:
        try:
            while not ended.is_set():
                with contextlib.ExitStack() as opened:
                    stores = []
                    for _ in range(8):
                        connection = opened.enter_context(attacker.open(session))
                        stores.append(prepare(session, next(keys)))
                        connection.send(push_call(stores[-1]), pack_data_head(1, 0, PART, 0), bytes(PART // 2))
                    for store_id in stores:
                        request = cache_pb2.CompleteStoreRequest(
                            session=session.ref, store_id=store_id, failed_items=[0]
                        )
                        session.cache.CompleteStore(request, timeout=60)
        except Exception as error:  # noqa: BLE001 - shown by the test
            defects.append(error)

    thread = threading.Thread(target=attack)
    wait_until(lambda: bulk_pid(site.server.pid) or attacker.address(session))
    thread.start()
    try:
        for number in range(5):
            assert_streams(site, f"beside stalled {number}")
    finally:
        ended.set()
        thread.join()
    assert not defects
    assert "is killed" not in site.server.log


def test_a_cancelled_end_of_a_store_leaves_no_exception(site: Site, attacker: Route, session: RawSession) -> None:
    """A client gives up while the server waits for its streams."""
    for number in range(10):
        with attacker.open(session) as connection:
            store_id = prepare(session, fresh(f"cancelled {number}", 1))
            connection.send(push_call(store_id), pack_data_head(1, 0, PART, 0), bytes(PART // 2))
            request = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=store_id, failed_items=[0])
            call = session.cache.CompleteStore.future(request, timeout=60)
            call.cancel()
            with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
                call.result(60)
    assert_streams(site, "after cancelled")
    assert "never retrieved" not in site.server.log
