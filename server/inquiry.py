"""How the command line asks a running server, and what the answers have in common on a terminal."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines would stand beside ours

import grpc
from rich.console import Console

from ..protos.endpoint import Endpoint
from ..protos.reasons import reason_of
from ..protos.v1.admin_pb2_grpc import AdminServiceStub

__all__ = ["InquiryError", "UnreachableError", "ask", "explain", "human_age", "plain_console", "seconds_of"]

_PLAIN_WIDTH = 140


class InquiryError(Exception):
    """A server answered, but not with what was asked; one line."""


class UnreachableError(InquiryError):
    """No server answered in time; one line."""


def ask(endpoint: Endpoint, method: str, request: Any, timeout: float) -> Any:
    """Calls a method of a server's `AdminService`, for at most `timeout` seconds. Raises `InquiryError`."""
    # A proxy that is meant for the web has no business between us and the server.
    with grpc.insecure_channel(endpoint.target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            return getattr(AdminServiceStub(channel), method)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise explain(error, endpoint, timeout) from None


def plain_console() -> Console:
    """Returns where people read: the terminal, or lines that are long enough for tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def seconds_of(duration: Any) -> float:
    """Returns a protobuf duration in seconds."""
    return float(duration.seconds) + float(duration.nanos) / 1e9


def human_age(seconds: float) -> str:
    """Returns a time span in its two largest units: "2 h 5 min"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def explain(error: grpc.RpcError, endpoint: Endpoint, timeout: float) -> InquiryError:
    """Returns what to say of a call that failed."""
    code, details = error.code(), (error.details() or "").partition("\n")[0]
    if reason_of(error.trailing_metadata()) is not None:
        return InquiryError(f"{endpoint}: {details}")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnreachableError(f"no answer from {endpoint} within {timeout:g} s")
    if code == grpc.StatusCode.UNAVAILABLE:
        return UnreachableError(f"no server answers at {endpoint}; is `kvtier serve` running there?")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return InquiryError(f"{endpoint} is a gRPC server, but not kvtier's, or one of an older version")
    return InquiryError(f"{endpoint}: {code.name}: {details}")
