"""Calls over gRPC and over sockets have the same refusals, counts, traces, limits and roles."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from harness.polling import async_wait_until
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvtier.protos.error_reasons import STATUS_OF, reason_within, status_within
from kvtier.protos.v1 import cache_pb2, cache_pb2_grpc, common_pb2
from kvtier.protos.wire.request_bounds import RequestBounds
from kvtier.protos.wire.socket_frames import HEAD_BYTES, unpack_answer
from kvtier.server.auth.audit_log import AuditLog
from kvtier.server.auth.roles import CALLER, OWNER, Identity, Role, require_role
from kvtier.server.config.schema import LimitConfig
from kvtier.server.refused import Refused
from kvtier.server.rpc.call_rules import CallRules
from kvtier.server.rpc.interceptor import RefusalInterceptor
from kvtier.server.rpc.slice_scheduler import SliceScheduler
from kvtier.server.rpc.socket_calls import CallContext, SocketCallServer, _run_eagerly
from kvtier.server.telemetry.tracing import Tracing
from kvtier.tiers import errors

SESSION = common_pb2.SessionRef(session_id=b"s" * 16, epoch=7)
LOOKUP, RELEASE = "CacheService/Lookup", "CacheService/ReleaseLease"
REQUEST = cache_pb2.LookupRequest(session=SESSION, request_id="r1").SerializeToString()
RELEASED = cache_pb2.ReleaseLeaseRequest(session=SESSION, lease_ids=[1]).SerializeToString()
READER = Identity("reader", "acme", frozenset({Role.READER}), shared_memory=False)
CORE_ERRORS = [
    error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, errors.CoreError)
]

Seen = tuple[int, bytes]
"""Status code of a call, and its answer or `google.rpc.Status`."""


@dataclass
class Record:
    """What a server records of its calls."""

    ended: list[tuple[str, str, str | None]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    audited: list[tuple[str, ...]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    rates: list[bytes] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    """For how many seconds the caller could not call again."""


class RecordedTracing(Tracing):
    def __init__(self, record: Record) -> None:
        self._record = record

    def record_request_id(self, request: Any) -> None:
        if request is not None:
            self._record.request_ids.append(getattr(request, "request_id", ""))

    def call_ended(self, method: str, code: str, seconds: float, context: Any) -> str | None:
        assert 0 <= seconds < 60
        return f"trace {code}"


class RecordedAudit(AuditLog):
    def __init__(self, record: Record) -> None:
        super().__init__(logs_reads=True)
        self._record = record

    def record_call(self, method: str, outcome: str) -> None:
        self._record.audited.append((method, outcome))

    def record_refusal(self, method: str, context: Any, reason: str, who: str | None = None) -> None:
        self._record.audited.append((method, reason, who or CALLER.get().name))


class Servicer(cache_pb2_grpc.CacheServiceServicer):
    """Answers with the name of the caller, or raises `error`."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.waits = True

    async def Lookup(self, _: object, __: object) -> cache_pb2.LookupResponse:  # noqa: N802
        if self.waits:
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return cache_pb2.LookupResponse(statuses=CALLER.get().name.encode())

    async def ReleaseLease(self, _: object, __: object) -> cache_pb2.ReleaseLeaseResponse:  # noqa: N802
        return cache_pb2.ReleaseLeaseResponse()


Call = Callable[[str, bytes], Awaitable[Seen]]


class Delaying(SliceScheduler):
    """Records the delays of refusals over gRPC."""

    def __init__(self, record: Record) -> None:
        registry: Any = type("Registry", (), {"tenant_of": lambda *_: "acme", "check": lambda *_: None})()
        super().__init__(registry)
        self._record = record

    async def delay_refusal(self, seconds: float) -> None:
        self._record.delays.append(seconds)


Serve = Callable[..., contextlib.AbstractAsyncContextManager[tuple[Call, Record]]]


def rules_of(record: Record, identity: Identity, is_limited: Callable[[], bool]) -> CallRules:
    def authorize(method: str, _: Any) -> None:
        CALLER.set(identity)
        require_role(f"kvtier.v1.{method.removeprefix('/kvtier.v1.')}", identity)

    def check_rate(session_id: bytes) -> None:
        record.rates.append(session_id)
        if is_limited():
            raise Refused("RATE_LIMITED", "too many calls", retry_after=0.5)

    return CallRules(
        lambda method, code, _, trace_id: record.ended.append((method, code, trace_id)),
        lambda *refusal: record.refused.append(refusal),
        RecordedTracing(record),
        authorize=authorize,
        audit_log=RecordedAudit(record),
        bounds=RequestBounds(LimitConfig()),
        check_rate=check_rate,
    )


@contextlib.asynccontextmanager
async def over_grpc(
    servicer: Servicer, identity: Identity = OWNER, is_limited: Callable[[], bool] = lambda: False
) -> AsyncIterator[tuple[Call, Record]]:
    record = Record()
    rules = rules_of(record, identity, is_limited)
    server = grpc.aio.server(interceptors=[RefusalInterceptor(rules, Delaying(record))])
    cache_pb2_grpc.add_CacheServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def call(method: str, message: bytes) -> Seen:
            ended = len(record.ended)
            running = channel.unary_unary(f"/kvtier.v1.{method}")(message, timeout=60)
            code = (await running.code()).value[0]
            if code:
                status = status_within(await running.trailing_metadata())
                assert status is not None, code
                assert (status.code, status.message) == (code, await running.details())
                answer = status.SerializeToString()
            else:
                answer = await running
            await async_wait_until(lambda: len(record.ended) > ended)
            return code, answer

        yield call, record
    await server.stop(0)


@contextlib.asynccontextmanager
async def over_sockets(
    servicer: Servicer, identity: Identity = OWNER, is_limited: Callable[[], bool] = lambda: False
) -> AsyncIterator[tuple[Call, Record]]:
    record = Record()
    server = SocketCallServer(rules_of(record, identity, is_limited), 1 << 20, Delaying(record))
    cache_pb2_grpc.add_CacheServiceServicer_to_server(servicer, server)

    async def call(method: str, message: bytes) -> Seen:
        answer, held_back = await server.call(1, method.encode(), message, CallContext(identity))
        record.delays += [held_back] if held_back else []
        return unpack_answer(answer[HEAD_BYTES:])

    yield call, record


async def on_both(act: Callable[[Call, Servicer], Awaitable[list[Seen]]], **settings: Any) -> tuple[Record, list[Seen]]:
    """Performs calls over gRPC and over sockets. Returns what both have recorded and answered."""
    results = []
    for serve in (over_grpc, over_sockets):
        servicer = Servicer()
        async with serve(servicer, **settings) as (call, record):
            results.append((record, await act(call, servicer)))
    assert results[0] == results[1]
    return results[0]


def reason_of(answer: Seen) -> str | None:
    return reason_within(status_pb2.Status.FromString(answer[1]))


ERRORS = [
    *(Refused(reason, f"text of {reason}") for reason in STATUS_OF),
    *(Refused(reason, "later", retry_after=0.25) for reason in STATUS_OF),
    Refused("UNKNOWN_SESSION", "no such session", audit_reason="WRONG_TENANT"),
    Refused("INVALID_ARGUMENT", "slow down", hold_back=99.0),
    *(error("text") for error in CORE_ERRORS),
    ValueError("a bug of a handler"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__} {getattr(error, 'reason', '')}")
async def test_refusals_are_equal(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status, reason, text, retry, metrics, audit log, traces, and the delay of the caller."""
    waits: list[int] = []

    async def count(_: CallRules) -> None:
        waits.append(1)

    monkeypatch.setattr("kvtier.server.rpc.in_flight_limits.RefusalPace.wait", count)

    async def act(call: Call, servicer: Servicer) -> list[Seen]:
        servicer.error = error
        return [await call(LOOKUP, REQUEST)]

    record, (answer,) = await on_both(act)
    reason = getattr(error, "reason", "INTERNAL")
    code = STATUS_OF[reason]
    status = status_pb2.Status.FromString(answer[1])
    assert (answer[0], reason_of(answer)) == (code.value[0], reason)
    assert ("defect of the server" in status.message) == (type(error) is ValueError)
    assert (str(error) in status.message) == (type(error) is not ValueError)
    retry = [detail for detail in status.details if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)]
    assert bool(retry) == (getattr(error, "retry_after", None) is not None)
    assert record.ended == [(f"/kvtier.v1.{LOOKUP}", code.name, f"trace {code.name}")]
    assert record.refused == [(f"/kvtier.v1.{LOOKUP}", reason)]
    audited = getattr(error, "audit_reason", reason)
    assert record.audited == [(f"/kvtier.v1.{LOOKUP}", audited, "owner"), (f"/kvtier.v1.{LOOKUP}", code.name)]
    hold_back = min(getattr(error, "hold_back", 0.0), 1.0)
    assert record.delays == ([hold_back] if hold_back else [])
    assert len(waits) == 2 * (reason == "UNAUTHENTICATED")


async def test_answers_are_equal() -> None:
    async def act(call: Call, _: Servicer) -> list[Seen]:
        return [await call(LOOKUP, REQUEST), await call(RELEASE, RELEASED)]

    record, answers = await on_both(act)
    assert answers == [(0, cache_pb2.LookupResponse(statuses=b"owner").SerializeToString()), (0, b"")]
    assert [(method, code) for method, code, _ in record.ended] == [
        (f"/kvtier.v1.{LOOKUP}", "OK"),
        (f"/kvtier.v1.{RELEASE}", "OK"),
    ]
    assert (record.refused, record.delays, record.request_ids) == ([], [], ["r1", ""])


@pytest.mark.parametrize(
    ("message", "text", "delays"),
    [
        (b"\xff" * 8, "cannot be parsed", []),
        (b"\x12\x02\xff\xff", "cannot be parsed", [0.1]),  # not UTF-8: the parser refuses it
        (cache_pb2.LookupRequest(request_id="x" * 100_000).SerializeToString(), "request_id", []),
    ],
    ids=["garbage", "invalid text", "beyond a bound"],
)
async def test_invalid_requests_are_refused_alike(message: bytes, text: str, delays: list[float]) -> None:
    """The handler gets none of them."""

    async def act(call: Call, _: Servicer) -> list[Seen]:
        return [await call(LOOKUP, message), await call(LOOKUP, REQUEST)]

    record, (refused, answer) = await on_both(act)
    assert text in status_pb2.Status.FromString(refused[1]).message
    assert (reason_of(refused), answer[0]) == ("INVALID_ARGUMENT", 0)
    assert record.request_ids == ["r1"]
    assert record.delays == delays


async def test_rates_limit_alike() -> None:
    """Both paths check the rate before they parse, except for calls that release."""

    async def act(call: Call, _: Servicer) -> list[Seen]:
        return [await call(LOOKUP, REQUEST), await call(LOOKUP, REQUEST + b"\xff"), await call(RELEASE, RELEASED)]

    record, answers = await on_both(act, is_limited=lambda: True)
    assert [code for code, _ in answers] == [8, 8, 0]
    assert record.rates == [SESSION.session_id] * 2
    assert record.request_ids == [""]
    assert record.delays == [0.5, 0.5]


async def test_roles_authorize_alike() -> None:
    """A caller without the role of a method gets PERMISSION_DENIED before its request is parsed."""

    async def act(call: Call, _: Servicer) -> list[Seen]:
        return [
            await call(LOOKUP, REQUEST),
            await call("CacheService/PrepareStore", b"\xff"),
        ]

    record, answers = await on_both(act, identity=READER)
    assert answers[0] == (0, cache_pb2.LookupResponse(statuses=b"reader").SerializeToString())
    assert reason_of(answers[1]) == "PERMISSION_DENIED"
    assert record.request_ids == ["r1"]
    assert record.audited[1:] == [
        ("/kvtier.v1.CacheService/PrepareStore", "PERMISSION_DENIED", "reader"),
        ("/kvtier.v1.CacheService/PrepareStore", "PERMISSION_DENIED"),
    ]


async def test_a_cancelled_call_is_recorded() -> None:
    servicer = Servicer()
    async with over_sockets(servicer) as (call, record):
        servicer.error = asyncio.CancelledError()
        with pytest.raises(asyncio.CancelledError):
            await call(LOOKUP, REQUEST)
    assert [(code, trace) for _, code, trace in record.ended] == [("CANCELLED", "trace CANCELLED")]
    assert record.refused == []


async def test_a_call_cancelled_before_its_refusal_is_recorded_as_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal of a caller without a credential waits. The client may disconnect meanwhile."""

    async def wait(_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr("kvtier.server.rpc.in_flight_limits.RefusalPace.wait", wait)
    servicer = Servicer()
    async with over_sockets(servicer) as (call, record):
        servicer.error = Refused("UNAUTHENTICATED", "no token")
        with pytest.raises(asyncio.CancelledError):
            await call(LOOKUP, REQUEST)
    assert [code for _, code, _ in record.ended] == ["CANCELLED"]


async def test_an_answer_that_is_no_message_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets INTERNAL, and the connection serves further calls."""

    async def nothing(*_: object) -> None: ...

    monkeypatch.setattr(Servicer, "ReleaseLease", nothing)
    async with over_sockets(Servicer()) as (call, record):
        assert reason_of(await call(RELEASE, RELEASED)) == "INTERNAL"
        assert (await call(LOOKUP, REQUEST))[0] == 0
    assert [code for _, code, _ in record.ended] == ["INTERNAL", "OK"]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_refused_call_has_no_request_id_of_an_earlier_call(*, waits: bool) -> None:
    """The calls of a connection share a context. One that waits ends in the context of its task."""
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    limited: list[bool] = []

    def check_rate(_: bytes) -> None:
        if limited:
            raise Refused("RATE_LIMITED", "too many calls")

    rules = CallRules(lambda *_: None, tracing=Tracing(provider), check_rate=check_rate)
    server = SocketCallServer(rules, 1 << 20, Delaying(Record()))
    servicer = Servicer()
    servicer.waits = waits
    cache_pb2_grpc.add_CacheServiceServicer_to_server(servicer, server)

    async def call() -> None:
        await server.call(1, LOOKUP.encode(), REQUEST, CallContext(OWNER))

    for _ in range(2):
        task = _run_eagerly(call(), lambda step, value: step(value))
        if task is not None:
            await task
        limited.append(True)
    ids = [dict(span.attributes or {}).get("kvtier.request_id") for span in spans.get_finished_spans()]
    assert ids == ["r1", None]
