"""Attack with many long calls at the same time, each of which is legal."""

from __future__ import annotations

import threading

import grpc
from google.protobuf.duration_pb2 import Duration
from harness.auth_site import PART, Site
from harness.payloads import key_of, namespace_of
from harness.raw import RawSession
from harness.server_process import MIB, own_bytes

from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys

CALLS = 400
KEYS = 8192
"""Of 80 bytes: a request of 672 KB takes about 3 MB in the server."""
SECONDS = 15.0
MOST = 400 * MIB
"""Growth at which the attack fails: 48 such requests run at the same time, and 16 arrive."""


def test_waiting_calls_take_bounded_memory(site: Site) -> None:
    """Each call waits for a block that the attacker begins to store and never completes."""
    credentials, namespace = site.credentials("acme-far"), namespace_of(PART, tenant="acme")
    with (
        RawSession(site.server.tcp, namespace, engine_id="writer", credentials=credentials) as writer,
        RawSession(site.server.tcp, namespace, engine_id="reader", credentials=credentials) as session,
    ):
        pending = key_of(0, salt="pending")
        writer.cache.PrepareStore(
            cache_pb2.PrepareStoreRequest(session=writer.ref, keys=pack_keys([pending])), timeout=60
        )
        keys = [pending, *(b"%076d" % number + bytes(4) for number in range(KEYS))]
        request = cache_pb2.LookupRequest(session=session.ref, keys=pack_keys(keys), wait=Duration(seconds=10))
        before = peak = own_bytes(site.server.pid)
        ended = threading.Semaphore(0)
        calls: list[grpc.Future] = []
        for _ in range(CALLS):
            call = session.cache.Lookup.future(request, timeout=SECONDS)
            call.add_done_callback(lambda _: ended.release())
            calls.append(call)
        for _ in calls:
            while not ended.acquire(timeout=0.05):
                peak = max(peak, own_bytes(site.server.pid))
        assert any(call.code() is grpc.StatusCode.OK for call in calls)
        assert peak < before + MOST, f"{(peak - before) // MIB} MiB more"
