"""Withdrawals: which ids a client sends to end grants, and when it sends them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from harness.polling import wait_until

from kvtier.client.session import withdrawals
from kvtier.client.session.session import ClientSession
from kvtier.client.session.withdrawals import Withdrawals
from kvtier.protos.error_reasons import error_details
from kvtier.protos.v1 import common_pb2, session_pb2


class Refusal(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """How gRPC raises the refusal of a call."""

    def __init__(self, code: grpc.StatusCode, reason: str = "") -> None:
        self._code, self._reason = code, reason

    def code(self) -> grpc.StatusCode:
        return self._code

    def trailing_metadata(self) -> Any:
        return error_details(self._reason, "no") if self._reason else ()


Refusal.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


class Channel:
    """Answers each call with the next outcome: an error, or None. Then it answers all calls."""

    def __init__(self) -> None:
        self.outcomes: deque[Exception | None] = deque()
        self.batches: list[tuple[bytes, list[int]]] = []
        self.on_call = lambda: None

    def unary_unary(self, *_: Any) -> Channel:
        return self

    def future(self, request: Any, timeout: float) -> Channel:
        self.batches.append((request.session.session_id, list(request.grant_ids)))
        self.on_call()
        return self

    def result(self) -> None:
        if self.outcomes and (error := self.outcomes.popleft()) is not None:
            raise error

    def cancel(self) -> None: ...


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Channel:
    monkeypatch.setattr(withdrawals, "_RETRY_SECONDS", 0.0)
    return Channel()


@pytest.fixture
def queue(channel: Channel) -> Iterator[Withdrawals]:
    made = Withdrawals(channel)  # type: ignore[arg-type]
    yield made
    made.close()


def session_of(name: bytes = b"a") -> ClientSession:
    return ClientSession(
        common_pb2.SessionRef(session_id=name, epoch=1), session_pb2.CapabilitiesResponse(), None, "", None
    )


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED"), 2),
        (Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED"), 2),
        (Refusal(grpc.StatusCode.UNAVAILABLE), 2),
        (Refusal(grpc.StatusCode.DEADLINE_EXCEEDED), 2),
        (Refusal(grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_SESSION"), 1),
        (Refusal(grpc.StatusCode.UNIMPLEMENTED), 1),
        (None, 1),
    ],
)
def test_a_withdrawal_is_repeated_until_the_server_decides(
    channel: Channel, queue: Withdrawals, error: Exception | None, calls: int
) -> None:
    """Otherwise a busy server would keep the lease. A refusal for another reason is final."""
    channel.outcomes.append(error)
    queue.add(session_of(), 7)
    wait_until(lambda: queue._thread is None)
    assert channel.batches == [(b"a", [7])] * calls


def test_many_withdrawals_need_few_calls(channel: Channel, queue: Withdrawals) -> None:
    """Each call has ids of one session, and no more than servers accept."""
    first, other = session_of(), session_of(b"b")
    most = withdrawals._MAX_IDS

    def add_more() -> None:
        channel.on_call = lambda: None
        for number in range(2, most + 3):
            queue.add(first, number)
        queue.add(other, 1)

    channel.on_call = add_more
    queue.add(first, 1)
    wait_until(lambda: queue._thread is None)
    assert channel.batches == [
        (b"a", [1]),
        (b"a", [*range(2, most + 2)]),
        (b"a", [most + 2]),
        (b"b", [1]),
    ]


def test_an_ended_session_needs_no_withdrawal(channel: Channel, queue: Withdrawals) -> None:
    """Its end has ended all of its grants. A failed call is not repeated either."""
    session, other = session_of(), session_of(b"b")
    channel.outcomes.append(Refusal(grpc.StatusCode.UNAVAILABLE))
    channel.on_call = session.end
    queue.add(session, 1)
    wait_until(lambda: queue._thread is None)
    queue.add(session, 2)
    queue.add(other, 3)
    wait_until(lambda: queue._thread is None)
    assert channel.batches == [(b"a", [1]), (b"b", [3])]
