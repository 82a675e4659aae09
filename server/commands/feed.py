"""Feed of the status of a server: calls that do not block, and the rates between two answers."""

from __future__ import annotations

import time
from typing import Any, Protocol

import grpc

from ...client.errors import KVTierError, NotConnected, error_from_call
from ...client.transport.sync_transport import ServiceTransport
from ...protos.endpoint import Endpoint
from ...protos.v1.admin_pb2 import GetStatusRequest, ListHandoffsRequest
from ..telemetry import status
from .admin_client import error_of
from .handoffs import values as handoff_values
from .rates import Values, rates

__all__ = ["FeedTarget", "StatusFeed"]


class FeedTarget(Protocol):
    """Object to which a feed passes answers, for example a screen."""

    sample: Values | None
    """Rates of the last interval; None until there are two answers of one server process."""
    holds: Values | None
    """Values of `kvtier handoffs`; None until the server has answered."""
    problem: str
    """Why the server does not answer; empty if it does."""
    as_of: str
    """Time of the sample."""


class StatusFeed:
    """Calls of one server that do not block: at most one status and one list of holds at a time."""

    def __init__(self, server: ServiceTransport, endpoint: Endpoint, timeout: float) -> None:
        self._server = server
        self._endpoint = endpoint
        self._timeout = timeout
        self._calls: dict[str, tuple[float, Any]] = {}
        self._before: tuple[float, Values] | None = None
        self.samples = 0
        """Number of samples that the target got."""

    def ask(self, *, holds: bool) -> None:
        """Starts the calls that are not running."""
        if "status" not in self._calls:
            call = self._server.start("AdminService/GetStatus", GetStatusRequest(), self._timeout)
            self._calls["status"] = time.monotonic(), call
        if holds and "holds" not in self._calls:
            call = self._server.start("AdminService/ListHandoffs", ListHandoffsRequest(), self._timeout)
            self._calls["holds"] = time.monotonic(), call

    @property
    def answer(self) -> Values | None:
        """Values of the last status; None if the server did not answer the last call."""
        return None if self._before is None else self._before[1]

    @property
    def waiting(self) -> bool:
        return bool(self._calls)

    def take(self, target: FeedTarget) -> bool:
        """Passes the answers of ended calls to the target; returns whether there were any.

        Raises `KVTierError` if the server refuses a call.
        """
        ended = [name for name, (_, call) in self._calls.items() if call.done()]
        for name in ended:
            asked, call = self._calls.pop(name)
            try:
                if name == "holds":
                    target.holds = handoff_values(call.result())
                else:
                    self._take_status(target, asked, status.values(call.result()))
            except grpc.RpcError as error:
                self._take_error(target, error_from_call(error))
        return bool(ended)

    def _take_status(self, target: FeedTarget, asked: float, answer: Values) -> None:
        before, self._before = self._before, (asked, answer)
        target.problem = ""
        if before is not None and before[1]["epoch"] == answer["epoch"]:
            target.sample = rates(before[1], answer, asked - before[0])
            target.as_of = time.strftime("%H:%M:%S")
            self.samples += 1

    def _take_error(self, target: FeedTarget, error: KVTierError) -> None:
        problem = error_of(error, self._endpoint, self._timeout)
        if not isinstance(problem, NotConnected):
            raise problem
        self._before = None
        target.problem = f"{problem}"
