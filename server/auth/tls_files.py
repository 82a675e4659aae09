"""TLS certificate of the server. The files can be replaced while the server runs.

At each handshake the server checks whether the files have changed, so the next connection uses a
new certificate. If the new files cannot be used together (a new key with the old certificate, an
incomplete file), the previous contents stay in use. The bulk process uses this module too.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from ...protos.credentials import PemError, check_certificates, check_pair
from ...protos.trusted_files import read_trusted

__all__ = [
    "ServerContext",
    "TlsError",
    "TlsFiles",
    "last_expiry",
    "read_files",
    "server_credentials",
]

_log = logging.getLogger(__name__)
_MAX_FILE_BYTES = 4 << 20
_DATES = (9, 10)  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and _HAS_EXPIRED


class TlsError(Exception):
    """The certificate cannot be used; the message is one line."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Contents of the files, and expiry dates in seconds since the Unix epoch."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    out_of_date: str
    """Error text if the certificate has expired or is not valid yet; otherwise empty."""
    cert_expires: float | None
    """Expiry of the certificate; None if it has expired or the date cannot be read."""
    client_ca_expires: float | None
    """Latest expiry of a client CA; None without client CAs, or if no date can be read."""


def read_files(cert: str, key: str, client_ca: str | None) -> TlsFiles:
    """Reads the PEM files and checks that key and certificate match. Raises `TlsError`."""
    try:
        # Read the files here first, because an error of OpenSSL does not name the file.
        cert_pem, key_pem = _contents(cert), _contents(key)
        roots = None if client_ca is None else _contents(client_ca)
    except OSError as error:
        raise TlsError(f"TLS with {cert} and {key}: {_describe(error)}") from None
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
    ca_expires = None if client_ca is None else last_expiry(client_ca)
    return TlsFiles(cert_pem, key_pem, roots, out_of_date, expires, ca_expires)


def server_credentials(
    cert: str, key: str, client_ca: str | None, report: Callable[[str], object] = lambda _: None
) -> grpc.ServerCredentials:
    """Returns credentials that are loaded again when the PEM files change.

    With `client_ca` each client must have a certificate. `report`: why the certificate in use is
    not the configured one, or why clients will refuse it. Raises `TlsError` if a file is missing,
    or if key and certificate do not match.
    """
    files = _Files(cert, key, client_ca, report)

    def changed() -> Any:  # None for "unchanged", which grpc's types do not allow
        loaded = files.load_changed()
        return None if loaded is None else _grpc_configuration(loaded)

    return grpc.dynamic_ssl_server_credentials(
        _grpc_configuration(files.load()), changed, require_client_authentication=client_ca is not None
    )


def _grpc_configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], root_certificates=files.client_ca)


class ServerContext:
    """TLS 1.3 context of the socket protocol, built again if the PEM files change. Thread-safe."""

    def __init__(self, cert: str, key: str, client_ca: str | None, protocol: str) -> None:
        """`protocol`: the only application protocol (ALPN). Raises `TlsError`."""
        self._paths = cert, key, client_ca
        self._protocol = protocol
        self._files = _Files(cert, key, client_ca)
        self._files.load()
        self._context = self._build()

    def current(self) -> ssl.SSLContext:
        if self._files.load_changed() is not None:
            try:
                self._context = self._build()
            except (OSError, ssl.SSLError) as error:  # the files have changed again since the check
                _log.warning("a new certificate cannot be used yet: %s", error)
        return self._context

    def _build(self) -> ssl.SSLContext:
        cert, key, client_ca = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols([self._protocol])
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC verifies
            context.load_verify_locations(client_ca)
        return context


class _Files:
    """The files and their version in use. Thread-safe: gRPC calls `load_changed` on its threads."""

    def __init__(
        self, cert: str, key: str, client_ca: str | None, report: Callable[[str], object] = lambda _: None
    ) -> None:
        self._report = report
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._lock = threading.Lock()
        self._loaded: Sequence[tuple[int, ...]] = ()

    def load(self) -> TlsFiles:
        try:
            self._loaded = self._versions()
        except OSError as error:
            raise TlsError(f"TLS with {self._cert} and {self._key}: {_describe(error)}") from None
        read = read_files(self._cert, self._key, self._client_ca)
        cause = f"clients will refuse the certificate {self._cert}: {read.out_of_date}" if read.out_of_date else ""
        if cause:
            _log.warning(cause)
        self._report(cause)
        return read

    def load_changed(self) -> TlsFiles | None:
        """Returns the contents if the files have changed and can be used, otherwise None."""
        with self._lock:
            try:
                if self._versions() == self._loaded:
                    return None
                loaded = self.load()
            except (OSError, TlsError) as error:
                cause = f"a new certificate cannot be used; the previous one stays in use: {error}"
                _log.error(cause)
                self._report(cause)
                return None
            _log.info("a new certificate is in use: %s", self._cert)
            return loaded

    def _versions(self) -> Sequence[tuple[int, ...]]:
        files = (self._cert, self._key, *filter(None, [self._client_ca]))
        # Includes ctime, because a change of owner or mode can make a file readable.
        return [(s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino) for s in map(os.stat, files)]


def _contents(path: str) -> bytes:
    return read_trusted(path, _MAX_FILE_BYTES)


def _dates(context: ssl.SSLContext, cert: str) -> tuple[str, float | None]:
    """Returns why the certificate is not valid now ("" if it is valid), and when it expires.

    The function gets both values from a handshake in memory with this certificate.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server) * 3:  # TLS 1.2 needs three rounds
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return (error.verify_message if error.verify_code in _DATES else ""), None
        except ssl.SSLError:  # clients will report any other problem
            return "", None
    try:
        return "", _expiry(client.getpeercert() or {})
    except ValueError:  # the handshake has not finished, or there is no certificate
        return "", None


def last_expiry(ca: str) -> float | None:
    """Returns the latest expiry of CAs in seconds since the Unix epoch, None if it is unreadable.

    Raises OSError if the file has no certificates.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    try:
        return max(filter(None, map(_expiry, context.get_ca_certs())), default=None)
    except (ValueError, ssl.SSLError):  # the module ssl cannot read the file, but gRPC might
        return None


def _expiry(certificate: Mapping[str, Any]) -> float | None:
    until = certificate.get("notAfter")
    return None if until is None else ssl.cert_time_to_seconds(until)


def _describe(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)
