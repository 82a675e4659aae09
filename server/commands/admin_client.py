"""Client of a running server's AdminService, for the commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's log lines would mix with the output

import grpc
from google.protobuf.message import Message
from rich.console import Console
from rich.text import Text

from ...protos.credentials import Credentials, CredentialsError
from ...protos.endpoint import Endpoint, EndpointError, client_endpoint
from ...protos.error_reasons import reason_of
from ...protos.v1.admin_pb2 import GetStatusRequest, GetStatusResponse
from ...protos.v1.admin_pb2_grpc import AdminServiceStub
from ..config.units import seconds_of
from ..printable import printable
from ..telemetry.status import enum_name
from .console import EXIT_FAILURE, EXIT_UNREACHABLE, EXIT_USAGE, print_line, refuse

__all__ = [
    "AdminClientError",
    "UnreachableError",
    "ask",
    "ask_status",
    "channel_to",
    "error_of",
    "follow",
    "json_values",
    "plain_console",
    "refuse_error",
    "show_answer",
]

_UNLIMITED_WIDTH = 10_000
_OPTIONS = (("grpc.enable_http_proxy", 0),)  # these calls must not go through an HTTP proxy
_STREAM_OPTIONS = (
    *_OPTIONS,
    # A streaming call has no time limit. These messages detect that the server's host is lost.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class AdminClientError(Exception):
    """The call failed, for example because the server refused it; the message is one line.

    `reason` is the server's `ErrorReason`; "TLS" after a TLS error; "TIMEOUT" if no answer arrived
    in time; empty for all other errors.
    """

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


class UnreachableError(AdminClientError):
    """No server answered in time; the message is one line."""


def channel_to(endpoint: Endpoint, options: Sequence[tuple[str, Any]] = _OPTIONS) -> grpc.Channel:
    """Returns a channel with the credentials of the environment. Raises `AdminClientError`."""
    try:
        return Credentials.from_environment().channel(endpoint, options)
    except CredentialsError as error:
        raise AdminClientError(f"{error}") from None


def ask(endpoint: Endpoint, method: str, request: Any, timeout: float, stub: type[Any] = AdminServiceStub) -> Any:
    """Calls a method of a service of the server. Raises `AdminClientError`."""
    with channel_to(endpoint) as channel:
        try:
            return getattr(stub(channel), method)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise error_of(error, endpoint, timeout) from None


def ask_status(endpoint: Endpoint, timeout: float) -> GetStatusResponse:
    answer: GetStatusResponse = ask(endpoint, "GetStatus", GetStatusRequest(), timeout)
    return answer


def follow(endpoint: Endpoint, method: str, request: Any, timeout: float) -> Generator[Any, None, None]:
    """Yields the answers of a streaming method of `AdminService`, without a time limit.

    The server must first answer a status call within `timeout` seconds. If the caller closes the
    iterator, the streaming call is cancelled. Raises `AdminClientError`.
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
    options: argparse.Namespace,
    fetch: Callable[[Endpoint, float], Any],
    to_json: Callable[[Any], str],
    show: Callable[[Any, Endpoint], None],
) -> int:
    """Shows the server's answer, or prints it as JSON with --json; returns the exit code."""
    try:
        endpoint = client_endpoint(options.endpoint)
        answer = fetch(endpoint, options.timeout)
    except (EndpointError, AdminClientError) as error:
        return refuse_error(error)
    if options.json:
        print_line(to_json(answer))
    else:
        show(answer, endpoint)
    return 0


def json_values(message: Message) -> dict[str, Any]:
    """Returns the fields of a message for JSON: durations in seconds, enum values by their name."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.enum_type is not None:
            values[field.name] = enum_name(field.enum_type, value)
        elif field.message_type is not None:
            values[f"{field.name}_seconds"] = seconds_of(value)
        else:
            values[field.name] = value
    return values


def refuse_error(error: EndpointError | AdminClientError) -> int:
    if isinstance(error, EndpointError):
        return refuse([f"{error}"], EXIT_USAGE)
    return refuse([f"{error}"], EXIT_UNREACHABLE if isinstance(error, UnreachableError) else EXIT_FAILURE)


class _PlainConsole(Console):
    """Console on which strings are no markup, and have escapes for control characters.

    Rich renders each string with `render_str`: lines, titles, and cells of tables. A `Text` object
    is shown as it is.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def plain_console() -> Console:
    """Returns a console for standard output. It wraps lines only on a terminal."""
    console = _PlainConsole()
    if not console.is_terminal:
        console.width = _UNLIMITED_WIDTH
    return console


def error_of(error: grpc.RpcError, endpoint: Endpoint, timeout: float) -> AdminClientError:
    code, details = error.code(), (error.details() or "").partition("\n")[0]
    if (reason := reason_of(error.trailing_metadata())) is not None:
        return AdminClientError(f"{endpoint}: {details}", reason)
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnreachableError(f"no answer from {endpoint} within {timeout:g} s", "TIMEOUT")
    if code == grpc.StatusCode.UNAVAILABLE:
        return _unreachable(endpoint, details)
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return AdminClientError(f"the gRPC server at {endpoint} is not kvtier, or its version is too old for this call")
    return AdminClientError(f"{endpoint}: {code.name}: {details}")


def _unreachable(endpoint: Endpoint, details: str) -> UnreachableError:
    """Returns the error for UNAVAILABLE, which can mean TLS, permissions, or no server."""
    if "handshake failed" in details:
        cause = details.rpartition("OPENSSL_internal:")[2].removesuffix(": OK")
        # If the certificate is expired or not yet valid, another --ca does not help.
        hint = "" if "expired" in cause or "not yet valid" in cause else "; is --ca the server's CA?"
        return UnreachableError(f"{endpoint}: the TLS handshake failed: {cause}{hint}", "TLS")
    if "Hostname Verification Check failed" in details:
        name = endpoint.tls_name or endpoint.host
        return UnreachableError(f"{endpoint}: the server's certificate is not for {name}", "TLS")
    if not endpoint.is_unix and ("Socket closed" in details or "reset by peer" in details):
        return UnreachableError(
            f"{endpoint} closed the connection; does it need TLS (--ca) or a client certificate (--cert, --key)?", "TLS"
        )
    if endpoint.is_unix and details.startswith("not connected to ") and "No such file" not in details:
        return UnreachableError(details)  # of the client: another user can answer there
    if endpoint.is_unix and "Permission denied" in details:
        return UnreachableError(f"{endpoint}: Permission denied; only the server's user and root can connect")
    return UnreachableError(f"no server answers at {endpoint}; is `kvtier serve` running there?")
