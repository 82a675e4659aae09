"""Client of a running server's AdminService, for the commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own log lines would mix with our output

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
    "error_of",
    "follow",
    "plain_console",
    "refuse_error",
    "show_answer",
]

_UNLIMITED_WIDTH = 10_000
_OPTIONS = (("grpc.enable_http_proxy", 0),)  # a proxy for the web must not handle these calls
_STREAM_OPTIONS = (
    *_OPTIONS,
    # Detects a host that has vanished, however long the call takes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class AdminClientError(Exception):
    """A server has refused the call or sent an unexpected answer; the message is one line.

    `reason` is the server's `ErrorReason`, "TLS" if the connection failed because of TLS, "TIMEOUT"
    if no answer came, or empty.
    """

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


class UnreachableError(AdminClientError):
    """No server answered in time; the message is one line."""


def channel_to(endpoint: Endpoint, options: Sequence[tuple[str, Any]] = _OPTIONS) -> grpc.Channel:
    """Returns a channel with the environment's credentials. Raises `AdminClientError`."""
    try:
        return Credentials.from_environment().channel(endpoint, options)
    except CredentialsError as error:
        raise AdminClientError(f"{error}") from None


def ask(endpoint: Endpoint, method: str, request: Any, timeout: float) -> Any:
    """Calls a method of a server's `AdminService`. Raises `AdminClientError`."""
    with channel_to(endpoint) as channel:
        try:
            return getattr(AdminServiceStub(channel), method)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise error_of(error, endpoint, timeout) from None


def ask_status(endpoint: Endpoint, timeout: float) -> GetStatusResponse:
    answer: GetStatusResponse = ask(endpoint, "GetStatus", GetStatusRequest(), timeout)
    return answer


def follow(endpoint: Endpoint, method: str, request: Any, timeout: float) -> Generator[Any, None, None]:
    """Yields the answers of a streaming method of `AdminService`, without a time limit.

    Before that the server must answer a status call within `timeout` seconds. Closing the iterator
    cancels the call. Raises `AdminClientError`.
    """
    ask_status(endpoint, timeout)
    with channel_to(endpoint, _STREAM_OPTIONS) as channel:
        call = getattr(AdminServiceStub(channel), method)(request)
        try:
            yield from call
        except grpc.RpcError as error:
            raise error_of(error, endpoint, timeout) from None
        finally:
            call.cancel()


def show_answer(
    options: argparse.Namespace, fetch: Callable[[Endpoint, float], Any], show: Callable[[Any, Endpoint], None]
) -> int:
    """Calls the server that the options name, and shows its answer; returns the exit code."""
    try:
        endpoint = client_endpoint(options.endpoint)
        answer = fetch(endpoint, options.timeout)
    except (EndpointError, AdminClientError) as error:
        return refuse_error(error)
    show(answer, endpoint)
    return 0


def refuse_error(error: EndpointError | AdminClientError) -> int:
    """Prints the error; returns the exit code."""
    if isinstance(error, EndpointError):
        return refuse([f"{error}"], EXIT_USAGE)
    return refuse([f"{error}"], EXIT_UNREACHABLE if isinstance(error, UnreachableError) else EXIT_FAILURE)


def plain_console() -> Console:
    """Returns a console on standard output. If that is no terminal, lines are not wrapped."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _UNLIMITED_WIDTH
    return console


def error_of(error: grpc.RpcError, endpoint: Endpoint, timeout: float) -> AdminClientError:
    """Converts the error of a call."""
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
    """Distinguishes the causes that gRPC reports as UNAVAILABLE: TLS, permissions, or no server."""
    if "handshake failed" in details:
        cause = details.rpartition("OPENSSL_internal:")[2].removesuffix(": OK")
        # If the certificate's dates are wrong, no other --ca helps.
        hint = "" if "expired" in cause or "not yet valid" in cause else "; does --ca fit?"
        return UnreachableError(f"{endpoint}: no TLS with it: {cause}{hint}", "TLS")
    if not endpoint.is_unix and ("Socket closed" in details or "reset by peer" in details):
        return UnreachableError(
            f"{endpoint} hangs up; does it want TLS (--ca), or a certificate (--cert, --key)?", "TLS"
        )
    if endpoint.is_unix and "Permission denied" in details:
        return UnreachableError(f"{endpoint}: Permission denied; it is for the server's user and root")
    return UnreachableError(f"no server answers at {endpoint}; is `kvtier serve` running there?")
