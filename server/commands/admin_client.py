"""Client of a running server's AdminService, for the commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator
from typing import Any

from google.protobuf.message import Message
from rich.console import Console
from rich.text import Text

from ...client.effects import Call
from ...client.errors import DeadlineExceeded, KVTierError, NotConnected, UnsupportedServer
from ...client.transport.sync_transport import ServiceTransport
from ...protos.durations import seconds_of
from ...protos.endpoint import Endpoint, EndpointError, client_endpoint
from ...protos.v1.admin_pb2 import GetStatusRequest, GetStatusResponse
from ..printable import printable
from ..telemetry.status import enum_name
from .console import EXIT_FAILURE, EXIT_UNREACHABLE, EXIT_USAGE, print_line, refuse

__all__ = [
    "ask",
    "ask_status",
    "connect",
    "error_of",
    "follow",
    "json_values",
    "plain_console",
    "refuse_error",
    "show_answer",
]

_UNLIMITED_WIDTH = 10_000


def connect(endpoint: Endpoint) -> ServiceTransport:
    """Returns a transport with the credentials of the environment. Raises `KVTierError`."""
    return ServiceTransport(endpoint, None)


def ask(endpoint: Endpoint, method: str, request: Any, timeout: float, service: str = "AdminService") -> Any:
    """Calls a method of a service of the server.

    Raises `KVTierError` with a message of one line: `NotConnected` if no server answered in time.
    """
    with connect(endpoint) as server:
        try:
            return server.perform(Call(f"{service}/{method}", request, timeout))
        except KVTierError as error:
            raise error_of(error, endpoint, timeout) from None


def ask_status(endpoint: Endpoint, timeout: float) -> GetStatusResponse:
    answer: GetStatusResponse = ask(endpoint, "GetStatus", GetStatusRequest(), timeout)
    return answer


def follow(endpoint: Endpoint, method: str, request: Any, timeout: float) -> Generator[Any, None, None]:
    """Yields the answers of a streaming method of `AdminService`, without a time limit.

    The server must first answer a status call within `timeout` seconds. If the caller closes the
    iterator, the streaming call is cancelled. Raises `KVTierError`.
    """
    ask_status(endpoint, timeout)
    with connect(endpoint) as server:
        try:
            yield from server.stream(f"AdminService/{method}", request)
        except KVTierError as error:
            raise error_of(error, endpoint, timeout) from None


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
    except (EndpointError, KVTierError) as error:
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


def refuse_error(error: EndpointError | KVTierError) -> int:
    if isinstance(error, EndpointError):
        return refuse([f"{error}"], EXIT_USAGE)
    return refuse([f"{error}"], EXIT_UNREACHABLE if isinstance(error, NotConnected) else EXIT_FAILURE)


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


def error_of(error: KVTierError, endpoint: Endpoint, timeout: float) -> KVTierError:
    """Returns an exception of the same kind whose message is one line with the server's address.

    Its `reason` is the server's `ErrorReason`; "TLS" after a TLS error; "TIMEOUT" if no answer
    arrived in time; empty for all other errors.
    """
    text = f"{error}".partition("\n")[0]
    if error.reason:
        return type(error)(f"{endpoint}: {text}", error.reason)
    if isinstance(error, DeadlineExceeded):
        return NotConnected(f"no answer from {endpoint} within {timeout:g} s", "TIMEOUT")
    if "connection attempt timed out" in text:  # after 5 s, or the time of the call
        return NotConnected(f"no answer from {endpoint}: the connection attempt timed out", "TIMEOUT")
    if isinstance(error, NotConnected):
        return _unreachable(endpoint, text.removeprefix("UNAVAILABLE: "))
    if isinstance(error, UnsupportedServer):
        return UnsupportedServer(
            f"the gRPC server at {endpoint} is not kvtier, or its version is too old for this call"
        )
    return type(error)(f"{endpoint}: {text}")


def _unreachable(endpoint: Endpoint, details: str) -> NotConnected:
    """Returns the error for UNAVAILABLE, which can mean TLS, permissions, or no server."""
    if "handshake failed" in details:
        cause = details.rpartition("OPENSSL_internal:")[2].removesuffix(": OK")
        # If the certificate is expired or not yet valid, another --ca does not help.
        hint = "" if "expired" in cause or "not yet valid" in cause else "; is --ca the server's CA?"
        return NotConnected(f"{endpoint}: the TLS handshake failed: {cause}{hint}", "TLS")
    if "Hostname Verification Check failed" in details:
        name = endpoint.tls_name or endpoint.host
        return NotConnected(f"{endpoint}: the server's certificate is not for {name}", "TLS")
    if not endpoint.is_unix and ("Socket closed" in details or "reset by peer" in details):
        return NotConnected(
            f"{endpoint} closed the connection; does it need TLS (--ca) or a client certificate (--cert, --key)?", "TLS"
        )
    if endpoint.is_unix and details.startswith("not connected to ") and "No such file" not in details:
        return NotConnected(details)  # of the client: another user can answer there
    if endpoint.is_unix and "Permission denied" in details:
        return NotConnected(f"{endpoint}: Permission denied; only the server's user and root can connect")
    return NotConnected(f"no server answers at {endpoint}; is `kvtier serve` running there?")
