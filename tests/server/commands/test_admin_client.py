"""Errors of the commands if a server cannot be reached."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from kvtier.client.errors import NotConnected, error_from
from kvtier.protos.credentials import Credentials, CredentialsError
from kvtier.protos.endpoint import parse_endpoint
from kvtier.server.commands.admin_client import error_of

SOCKET, ADDRESS = "unix:/run/kvtier/kvtier.sock", "10.0.0.7:7450"
EXPIRED = (
    "Ssl handshake failed: SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: "
)
SAID = (
    (SOCKET, "unix:/run/kvtier/kvtier.sock: connect: No such file or directory (2)", "no server answers at", ""),
    (
        SOCKET,
        "UNKNOWN:/run/kvtier/kvtier.sock: connect: Permission denied (13)",
        "Permission denied; only the server's user",
        "answers",
    ),
    (SOCKET, "UNKNOWN: unix:/s: connection attempt timed out before receiving SETTINGS frame", "no answer", "running"),
    (ADDRESS, f"{EXPIRED}certificate has expired", "VERIFY_FAILED: certificate has expired", "--ca"),
    (
        ADDRESS,
        "Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification Check failed.",
        "certificate is not for 10.0.0.7",
        "answers",
    ),
    (
        ADDRESS,
        f"{EXPIRED}unable to get local issuer certificate",
        "local issuer certificate; is --ca the server's CA?",
        "answers",
    ),
)


@pytest.mark.parametrize(("endpoint", "details", "wanted", "unwanted"), SAID)
def test_errors_name_the_server_and_a_remedy(endpoint: str, details: str, wanted: str, unwanted: str) -> None:
    """The text is derived from the status and details of gRPC."""
    failed = error_from(grpc.StatusCode.UNAVAILABLE, details, None)
    error = error_of(failed, parse_endpoint(endpoint), 5)
    text = f"{error}"
    assert isinstance(error, NotConnected)
    assert wanted in text
    assert not unwanted or unwanted not in text


def test_a_missing_token_file_is_named_once() -> None:
    """The text omits the number of the kernel's error."""
    with pytest.raises(CredentialsError, match=r"^token_file /none: No such file or directory$"):
        Credentials(token_file=Path("/none").as_posix()).channel(parse_endpoint(SOCKET))
