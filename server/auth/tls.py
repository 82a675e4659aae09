"""The server's certificate, from files that may be replaced while it runs.

Each handshake looks at the files, so that a new certificate is in use from the next connection on. What does not fit
together (a new key and the old certificate, half a file) leaves the one that was in use. Server and bulk process both have this.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from ...protos.credentials import PemError, check_certificates, check_pair

__all__ = ["TlsError", "TlsFiles", "read_files", "server_credentials"]

_log = logging.getLogger(__name__)
_DATES = (9, 10)  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and _HAS_EXPIRED


class TlsError(Exception):
    """The certificate cannot be used; one line."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What the files have, which gRPC can use; and the dates in them, in seconds since the epoch."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    out_of_date: str
    """Why clients refuse the certificate at this time; nothing if its dates are right."""
    cert_expires: float | None
    """When it expires; None if it has, or if that cannot be told."""
    client_ca_expires: float | None
    """When the last of those expires who vouch for clients; None if there are none, or if that cannot be told."""


def read_files(cert: str, key: str, client_ca: str | None) -> TlsFiles:
    """Reads the files (PEM), and looks whether they belong together. Raises TlsError."""
    try:
        # Read before OpenSSL does: it does not say which of them may not be read.
        cert_pem, key_pem = _contents(cert), _contents(key)
        roots = None if client_ca is None else _contents(client_ca)
    except OSError as error:
        raise TlsError(f"TLS with {cert} and {key}: {_said(error)}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for path in filter(None, (cert, client_ca)):
        try:
            check_certificates(path)
        except PemError as error:
            raise TlsError(f"TLS with {path}: {error}") from None
    try:
        check_pair(cert, key, context)
    except PemError as error:
        raise TlsError(f"TLS with {cert} and {key}: {error}") from None
    out_of_date, expires = _dates(context, cert)
    return TlsFiles(cert_pem, key_pem, roots, out_of_date, expires, _last_expiry(client_ca))


def server_credentials(cert: str, key: str, client_ca: str | None) -> grpc.ServerCredentials:
    """Returns credentials that follow the files (PEM). With `client_ca` clients must show a certificate that it vouches for.

    Raises:
        TlsError: the files are not there, or do not belong together.
    """
    files = _Files(cert, key, client_ca)
    changed: Any = files.changed  # None means that nothing has, which grpc's types do not know
    return grpc.dynamic_ssl_server_credentials(
        files.load(), changed, require_client_authentication=client_ca is not None
    )


class _Files:
    """The files, and which of their versions is in use. gRPC asks on threads of its own."""

    def __init__(self, cert: str, key: str, client_ca: str | None) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._lock = threading.Lock()
        self._seen: Sequence[tuple[int, ...]] = ()

    def load(self) -> grpc.ServerCertificateConfiguration:
        """Reads the files. Raises TlsError."""
        try:
            self._seen = self._look()
        except OSError as error:
            raise TlsError(f"TLS with {self._cert} and {self._key}: {_said(error)}") from None
        read = read_files(self._cert, self._key, self._client_ca)
        if read.out_of_date:
            _log.warning("clients will refuse the certificate %s: %s", self._cert, read.out_of_date)
        return grpc.ssl_server_certificate_configuration([(read.key, read.cert)], root_certificates=read.client_ca)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns the new files' contents if there are new ones, and they are sound."""
        with self._lock:
            try:
                if self._look() == self._seen:
                    return None
                loaded = self.load()
            except (OSError, TlsError) as error:
                _log.warning("a new certificate cannot be used, the old one stays: %s", error)
                return None
            _log.info("a new certificate is in use: %s", self._cert)
            return loaded

    def _look(self) -> Sequence[tuple[int, ...]]:
        files = (self._cert, self._key, *filter(None, [self._client_ca]))
        # The time of the last change of owner or mode as well: one that could not be read may be readable now.
        return [(s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino) for s in map(os.stat, files)]


def _contents(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123
        return file.read()


def _dates(context: ssl.SSLContext, cert: str) -> tuple[str, float | None]:
    """Returns why the server's certificate is not valid at this time (nothing if it is), and until when it is.

    `ssl` reads no dates of one's own certificate, so a client that trusts just this one is shown it, in memory.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server) * 3:  # TLS 1.2 takes so many
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return (error.verify_message if error.verify_code in _DATES else ""), None
        except ssl.SSLError:  # what else it may dislike is for real clients to say
            return "", None
    try:
        return "", _expiry(client.getpeercert() or {})
    except ValueError:  # it has not come to an end, or to a certificate
        return "", None


def _last_expiry(client_ca: str | None) -> float | None:
    if client_ca is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(client_ca)
    try:
        return max(filter(None, map(_expiry, context.get_ca_certs())), default=None)
    except (ValueError, ssl.SSLError):  # more than `ssl` can read; gRPC may
        return None


def _expiry(certificate: Mapping[str, Any]) -> float | None:
    until = certificate.get("notAfter")
    return None if until is None else ssl.cert_time_to_seconds(until)


def _said(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)
