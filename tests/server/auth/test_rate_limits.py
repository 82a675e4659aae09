"""Rate limits of a tenant: the token buckets, and a server that refuses with a retry hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from harness.auth_site import KEYS, PART, TIMEOUTS, error_of
from harness.bulk import wait_for_bulk
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.raw import RawSession, refusal_of
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, LimitExceeded
from kvtier.protos.error_reasons import status_within
from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.server.auth import rate_limits
from kvtier.server.auth.rate_limits import RateLimiter, RateLimiters
from kvtier.server.config.schema import RateConfig
from kvtier.server.refused import Refused


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_limiter_with_open_sessions_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only limiters without sessions are dropped, so that the limit of sessions holds."""
    monkeypatch.setattr(rate_limits, "_MAX_LIMITERS", 2)
    limiters = RateLimiters(RateConfig(sessions=1), {}, Clock())
    busy = limiters.for_tenant("busy")
    assert busy is not None
    busy.open_session()
    idle = limiters.for_tenant("idle")
    limiters.for_tenant("third")
    assert limiters.for_tenant("busy") is busy
    assert limiters.for_tenant("idle") is not idle


def test_calls_beyond_a_burst_of_ten_seconds_are_refused() -> None:
    """The refusal says after how long the next call is allowed."""
    clock = Clock()
    limiter = RateLimiter("t", RateConfig(calls=5.0), clock)
    for _ in range(50):
        limiter.count_call()
    with pytest.raises(Refused) as refused:
        limiter.count_call()
    assert (refused.value.reason, refused.value.retry_after) == ("RATE_LIMITED", pytest.approx(0.2))
    clock.now += 0.2
    limiter.count_call()
    with pytest.raises(Refused):
        limiter.count_call()
    clock.now += 1000.0
    for _ in range(50):
        limiter.count_call()
    with pytest.raises(Refused):
        limiter.count_call()


def test_calls_that_give_back_resources_may_exceed_the_rate() -> None:
    """Up to 1,024 such calls pass beyond the limit, and count against later calls."""
    clock = Clock()
    limiter = RateLimiter("t", RateConfig(calls=1.0), clock)
    for _ in range(10):
        limiter.count_call()
    for _ in range(1024):
        limiter.count_call(is_release=True)
    with pytest.raises(Refused):
        limiter.count_call(is_release=True)
    clock.now += 1.0
    limiter.count_call(is_release=True)
    with pytest.raises(Refused) as refused:
        limiter.count_call()
    assert refused.value.retry_after == pytest.approx(1025.0)


def test_bytes_beyond_the_limit_delay_the_next_stream() -> None:
    """A running stream is never interrupted."""
    clock = Clock()
    limiter = RateLimiter("t", RateConfig(bytes=1000), clock)
    limiter.check_stream()
    limiter.count_bytes(30_000)
    with pytest.raises(Refused) as refused:
        limiter.check_stream()
    assert refused.value.retry_after == pytest.approx(20.001)
    clock.now += 20.1
    limiter.check_stream()


def test_opening_a_session_counts_as_a_call() -> None:
    """Opening sessions in a loop is refused; refused sessions do not count as open."""
    clock = Clock()
    limiter = RateLimiter("t", RateConfig(calls=1.0), clock)
    for _ in range(10):
        limiter.open_session()
        limiter.close_session()
    for _ in range(3):
        with pytest.raises(Refused) as refused:
            limiter.open_session()
        assert refused.value.reason == "RATE_LIMITED"
    assert limiter.sessions == 0
    clock.now += 1.0
    limiter.open_session()
    assert limiter.sessions == 1


def test_limits_are_per_tenant_and_its_table_overrides_the_default() -> None:
    """The number of buckets in memory stays bounded."""
    clock = Clock()
    limiters = RateLimiters(RateConfig(calls=1.0), {"a": RateConfig(sessions=1), "b": RateConfig(calls=9.0)}, clock)
    first = limiters.for_tenant("a")
    assert limiters.for_tenant("a") is first
    first.open_session()
    with pytest.raises(Refused, match="1 sessions of tenant 'a' are open already"):
        first.open_session()
    for _ in range(9):  # with the call that opened the session: ten
        first.count_call()
    with pytest.raises(Refused):
        first.count_call()
    assert RateLimiters(RateConfig(), {"a": RateConfig(sessions=1)}).for_tenant("b") is None
    for number in range(5000):
        limiters.for_tenant(f"t{number}")
    assert len(limiters._limiters) <= 1024
    assert limiters.for_tenant("a") is first


def test_a_tenant_beyond_its_limits_is_refused_and_others_are_not(tmp_path: Path) -> None:
    """Calls and streams get RATE_LIMITED with a retry hint; sessions get LIMIT_EXCEEDED."""
    config = '[tenants.slow]\nrates = {calls = 2, bytes = "4KiB", sessions = 2}'
    slow, quick = namespace_of(PART, tenant="slow"), namespace_of(PART, tenant="quick")
    with (
        ServerProcess(tmp_path, region=16 * MIB, config=config) as server,
        RawSession(server.start().endpoint, slow, engine_id="e", rank=0) as mine,
        RawSession(server.endpoint, quick, engine_id="e", rank=0) as theirs,
    ):
        refusal = None
        for _ in range(60):
            try:
                mine.cache.Lookup(cache_pb2.LookupRequest(session=mine.ref, keys=pack_keys(KEYS)), timeout=60)
            except grpc.RpcError as error:
                refusal = error
        assert refusal_of(refusal) == ("RESOURCE_EXHAUSTED", "RATE_LIMITED")
        status = status_within(refusal.trailing_metadata())
        hint = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(hint) for detail in status.details)
        assert 0 < hint.retry_delay.ToNanoseconds() <= 1e9
        for _ in range(60):
            theirs.cache.Lookup(cache_pb2.LookupRequest(session=theirs.ref, keys=pack_keys(KEYS)), timeout=60)
        with (
            Client(server.endpoint, namespace=slow, timeouts=TIMEOUTS) as second,
            Client(server.endpoint, namespace=quick, timeouts=TIMEOUTS) as other,
        ):
            second.wait_until_connected(60)
            with Client(server.endpoint, namespace=slow, timeouts=TIMEOUTS) as third:

                def is_refused() -> bool:
                    error = error_of(third, 0.05)
                    return isinstance(error, LimitExceeded) and error.reason == "LIMIT_EXCEEDED"

                wait_until(is_refused, 20)  # the calls above may still count at first
            other.wait_until_connected(60)
        with Client(server.endpoint, namespace=slow, timeouts=TIMEOUTS) as third:
            third.wait_until_connected(60)


def test_sessions_in_a_loop_are_refused(tmp_path: Path) -> None:
    """The tenant gets a retry hint, and is admitted after that time."""
    config = "[tenants.slow]\nrates = {calls = 2}"
    slow, quick = namespace_of(PART, tenant="slow"), namespace_of(PART, tenant="quick")
    with ServerProcess(tmp_path, region=16 * MIB, config=config) as server:
        server.start()
        refusal = None
        for _ in range(60):
            try:
                RawSession(server.endpoint, slow, engine_id="e").close()
            except grpc.RpcError as error:
                refusal = error
            RawSession(server.endpoint, quick, engine_id="e").close()
        assert refusal_of(refusal) == ("RESOURCE_EXHAUSTED", "RATE_LIMITED")
        status = status_within(refusal.trailing_metadata())
        assert "RetryInfo" in {detail.type_url.rpartition(".")[2] for detail in status.details}
        server.wait_for(lambda status: not status.sessions)
        with Client(server.endpoint, namespace=slow, timeouts=TIMEOUTS) as client:
            client.wait_until_connected(60)


def test_a_session_that_fails_to_open_is_not_counted(tmp_path: Path) -> None:
    """After refusals of a namespace that is too large, the one allowed session can still open."""
    with ServerProcess(tmp_path, region=16 * MIB, config="[tenants.one]\nrates = {sessions = 1}") as server:
        server.start()
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as refused:
                RawSession(server.endpoint, namespace_of(32 * MIB, tenant="one"), engine_id="e")
            assert refusal_of(refused.value)[1] == "INVALID_NAMESPACE"
        with RawSession(server.endpoint, namespace_of(PART, tenant="one"), engine_id="e"):
            pass


def test_a_rate_limited_tenant_can_complete_its_stores(tmp_path: Path) -> None:
    """Otherwise its slots would stay in quarantine while the session maps the region."""
    config = "[leases]\ndefault = 1\n[tenants.slow]\nrates = {calls = 1}"
    with (
        ServerProcess(tmp_path, region=16 * MIB, config=config) as server,
        Client(server.start().endpoint, namespace=namespace_of(PART, tenant="slow"), timeouts=TIMEOUTS) as client,
    ):
        client.wait_until_connected(60)
        # The session took one of ten calls; the last one prepares a store.
        reasons = []
        for number in range(24):
            key = key_of(number)
            try:
                client.store([key], [payload(key, PART)])
            except LimitExceeded as error:
                reasons.append(error.reason)
        assert set(reasons) == {"RATE_LIMITED"}
        server.wait_for(lambda status: not status.stores and not status.quarantined_bytes)
        assert client.connected


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_streams_are_limited_by_bytes(tmp_path: Path, transport: Any) -> None:
    """Server and bulk process refuse a stream beyond the limit and store nothing."""
    config = '[tenants.slow]\nrates = {bytes = "4KiB"}'
    namespace = namespace_of(MIB // 2, tenant="slow")
    with (
        ServerProcess(tmp_path, region=16 * MIB, config=config).start() as server,
        Client(server.endpoint, namespace=namespace, transport=transport, timeouts=TIMEOUTS) as client,
    ):
        client.wait_until_connected(60)
        if transport == "tcp":
            wait_for_bulk(client)  # finding the bulk process takes calls, too
        # more than the limit of several minutes
        client.store([key_of(0)], [payload(key_of(0), MIB // 2)])
        before = server.status().sessions[0].calls
        with pytest.raises(LimitExceeded) as refused:
            client.store([key_of(1)], [payload(key_of(1), MIB // 2)])
        assert refused.value.reason == "RATE_LIMITED"
        # PrepareStore, the stream and CompleteStore: a refused stream is not retried at once.
        assert server.status().sessions[0].calls - before <= 3
        server.wait_for(lambda status: not status.stores)
