"""How the commands ask a running server: the one place where its endpoint is read, and what shows who asks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines would stand beside ours

import grpc
from rich.console import Console

from ...protos.credentials import Credentials, CredentialsError
from ...protos.endpoint import Endpoint, EndpointError, client_endpoint
from ...protos.error_reasons import reason_of
from ...protos.v1.admin_pb2 import GetStatusRequest, GetStatusResponse
from ...protos.v1.admin_pb2_grpc import AdminServiceStub
from .console import EXIT_FAILURE, EXIT_UNREACHABLE, EXIT_USAGE, refuse

__all__ = [
    "AdminClientError",
    "UnreachableError",
    "ask",
    "ask_status",
    "channel_to",
    "explain",
    "follow",
    "inquire",
    "plain_console",
    "refuse_inquiry",
]

# Whatever a line has: what reads it is no terminal, and breaks none.
_PLAIN_WIDTH = 10_000
_OPTIONS = (
    # A proxy that is meant for the web has no business between us and the server.
    ("grpc.enable_http_proxy", 0),
)
_LONG_OPTIONS = (
    *_OPTIONS,
    # A host that vanishes is noticed, however long the call takes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class AdminClientError(Exception):
    """A server answered, but not with what was asked; one line.

    Attributes:
        reason: the server's `ErrorReason`, or nothing where there is none; "TLS" where that let no connection come about,
            "TIMEOUT" where no answer came.
    """

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


class UnreachableError(AdminClientError):
    """No server answered in time; one line."""


def channel_to(endpoint: Endpoint, options: Sequence[tuple[str, Any]] = _OPTIONS) -> grpc.Channel:
    """Returns a channel to a server, with the credentials of the environment. Raises `AdminClientError`."""
    try:
        return Credentials.from_environment().channel(endpoint, options)
    except CredentialsError as error:
        raise AdminClientError(f"{error}") from None


def ask(endpoint: Endpoint, method: str, request: Any, timeout: float) -> Any:
    """Calls a method of a server's `AdminService`, for at most `timeout` seconds. Raises `AdminClientError`."""
    with channel_to(endpoint) as channel:
        try:
            return getattr(AdminServiceStub(channel), method)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise explain(error, endpoint, timeout) from None


def ask_status(endpoint: Endpoint, timeout: float) -> GetStatusResponse:
    """Asks a server for its status, for at most `timeout` seconds. Raises `AdminClientError`."""
    answer: GetStatusResponse = ask(endpoint, "GetStatus", GetStatusRequest(), timeout)
    return answer


def follow(endpoint: Endpoint, method: str, request: Any, timeout: float) -> Generator[Any, None, None]:
    """Yields what a streaming method of a server's `AdminService` says, for as long as that takes.

    `timeout` seconds are waited for the server to answer at all. Closing the iterator cancels the call. Raises `AdminClientError`.
    """
    ask_status(endpoint, timeout)
    with channel_to(endpoint, _LONG_OPTIONS) as channel:
        call = getattr(AdminServiceStub(channel), method)(request)
        try:
            yield from call
        except grpc.RpcError as error:
            raise explain(error, endpoint, timeout) from None
        finally:
            call.cancel()


def inquire(
    options: argparse.Namespace, fetch: Callable[[Endpoint, float], Any], show: Callable[[Any, Endpoint], None]
) -> int:
    """Asks the server that the options name, and shows what it answers; returns the exit code."""
    try:
        endpoint = client_endpoint(options.endpoint)
        answer = fetch(endpoint, options.timeout)
    except (EndpointError, AdminClientError) as error:
        return refuse_inquiry(error)
    show(answer, endpoint)
    return 0


def refuse_inquiry(error: EndpointError | AdminClientError) -> int:
    """Says why a server was not asked, or did not answer; returns the exit code."""
    if isinstance(error, EndpointError):
        return refuse([f"{error}"], EXIT_USAGE)
    return refuse([f"{error}"], EXIT_UNREACHABLE if isinstance(error, UnreachableError) else EXIT_FAILURE)


def plain_console() -> Console:
    """Returns where people read: the terminal, or lines as long as they are."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def explain(error: grpc.RpcError, endpoint: Endpoint, timeout: float) -> AdminClientError:
    """Returns what to say of a call that failed."""
    code, details = error.code(), (error.details() or "").partition("\n")[0]
    if (reason := reason_of(error.trailing_metadata())) is not None:
        return AdminClientError(f"{endpoint}: {details}", reason)
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnreachableError(f"no answer from {endpoint} within {timeout:g} s", "TIMEOUT")
    if code == grpc.StatusCode.UNAVAILABLE:
        return _unreachable(endpoint, details)
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return AdminClientError(f"{endpoint} is a gRPC server, but not kvtier's, or one of an older version")
    return AdminClientError(f"{endpoint}: {code.name}: {details}")


def _unreachable(endpoint: Endpoint, details: str) -> UnreachableError:
    """Tells somebody who hangs up from nobody who listens: gRPC calls both unavailable."""
    if "handshake failed" in details:
        cause = details.rpartition("OPENSSL_internal:")[2].removesuffix(": OK")
        # Dates are the certificate's own affair: no other --ca helps.
        doubt = "" if "expired" in cause or "not yet valid" in cause else "; does --ca fit?"
        return UnreachableError(f"{endpoint}: no TLS with it: {cause}{doubt}", "TLS")
    if not endpoint.is_unix and ("Socket closed" in details or "reset by peer" in details):
        return UnreachableError(
            f"{endpoint} hangs up; does it want TLS (--ca), or a certificate (--cert, --key)?", "TLS"
        )
    if endpoint.is_unix and "Permission denied" in details:
        return UnreachableError(f"{endpoint}: Permission denied; it is for the server's user and root")
    return UnreachableError(f"no server answers at {endpoint}; is `kvtier serve` running there?")
