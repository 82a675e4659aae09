"""Attack with small calls that wait: each change in the server wakes all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from harness.payloads import key_of, namespace_of
from harness.polling import wait_until
from harness.raw import RawSession
from harness.server_process import ServerProcess

from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys

CONNECTIONS, CALLS = 3, 200
WAITING = 256
"""Calls of a tenant that may wait; the server answers others at once."""
WAIT = Duration(seconds=3600)
KEY = key_of(0)


def flush(session: RawSession) -> grpc.Future:
    return session.cache.Flush.future(cache_pb2.FlushRequest(session=session.ref, keys=pack_keys([KEY]), wait=WAIT))


def reset(session: RawSession) -> grpc.Future:
    return session.cache.Reset.future(cache_pb2.ResetRequest(session=session.ref, wait=WAIT))


@pytest.mark.parametrize("call", [flush, reset])
def test_few_calls_of_a_tenant_wait(tmp_path: Path, call: Callable[[RawSession], grpc.Future]) -> None:
    """2,169 waiting resets left 1.4 of 320 steps per second to another tenant."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(ServerProcess(tmp_path, config='[limits]\nmax_wait = "1h"').start())
        calls: list[grpc.Future] = []
        for number in range(CONNECTIONS):
            space = namespace_of(4096, model=f"{number}", tenant="acme")
            session = opened.enter_context(RawSession(server.endpoint, space, engine_id=f"{number}"))
            request = cache_pb2.PrepareStoreRequest(session=session.ref, keys=pack_keys([KEY]))
            session.cache.PrepareStore(request, timeout=60)  # never completed
            calls += [call(session) for _ in range(CALLS)]
        wait_until(lambda: sum(each.done() for each in calls) >= len(calls) - WAITING)
        answered = [each for each in calls if each.done()]
        assert {each.code() for each in answered} == {grpc.StatusCode.OK}
        assert len(answered) < len(calls), "calls within the limit wait"
