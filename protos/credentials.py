"""Client credentials (CA, certificate, token), the gRPC channels that use them, and PEM checks.

A TCP connection uses TLS if `ca` is set, or `cert` and `key`. The client sends its token with every
call. It sends the token over TCP without TLS only if `insecure` is set.
"""

from __future__ import annotations

import functools
import logging
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self

import grpc

from .endpoint import CREDENTIAL_VARIABLES, Endpoint
from .socket_owner import ForeignSocketError, check_path, is_chosen
from .trusted_files import check_trusted, read_trusted

__all__ = ["Credentials", "CredentialsError", "PairError", "PemError", "check_certificates", "check_pair"]

_log = logging.getLogger(__name__)

_SYSTEM: Final = "system"
_MAX_FILE_BYTES: Final = 1 << 20
_MISMATCH = "KEY_VALUES_MISMATCH"


class CredentialsError(ValueError):
    """Credentials that cannot be used. The message is one line without secrets."""


class PemError(ValueError):
    """A PEM file that cannot be used. Callers add the file's name to the message."""


class PairError(PemError):
    """A key that belongs to another certificate or has a password, so no TLS library accepts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Credentials of a client. All are optional; a Unix socket usually needs none.

    Attributes:
        ca: file with the CA certificates (PEM) that verify the server; "system" for gRPC's default.
        cert: file with this client's certificate chain (PEM), if the server requires one.
        key: file with the private key of `cert` (PEM).
        token: bearer token, as printed by `kvtier token new`.
        token_file: file with the token; the client reads it again when it changes.
        insecure: whether a token may be sent over TCP without TLS.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    insecure: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Self:
        """Returns credentials from `given` and the environment; `given` takes precedence.

        If a token or token file is given, the environment's token and token file are ignored.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {
            name: environ.get(variable, "").strip() or None for name, variable in CREDENTIAL_VARIABLES.items()
        }
        values["insecure"] = (values["insecure"] or "").lower() in ("true", "yes", "on", "1")
        if given.get("token") or given.get("token_file"):
            values["token"] = values["token_file"] = None
        return cls(**values | {name: value for name, value in given.items() if value is not None})

    @property
    def has_token(self) -> bool:
        return self.token is not None or self.token_file is not None

    def is_tls(self, endpoint: Endpoint) -> bool:
        """Whether connections to this endpoint use TLS."""
        return not endpoint.is_unix and (self.ca is not None or self.cert is not None)

    def channel(self, endpoint: Endpoint, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """Returns a channel to a server. Raises CredentialsError.

        In the default directory its calls fail as UNAVAILABLE if another user owns the socket.
        """
        tls = self._tls(endpoint)
        options = _with_name(endpoint, options)
        channel = (
            grpc.insecure_channel(endpoint.target, options)
            if tls is None
            else grpc.secure_channel(endpoint.target, tls, options)
        )
        extended = self._extended(endpoint)
        return grpc.intercept_channel(channel, _Interceptor(extended)) if extended is not None else channel

    def aio_channel(self, endpoint: Endpoint, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """Returns a channel for asyncio, as `channel` does. Raises CredentialsError."""
        tls = self._tls(endpoint)
        extended = self._extended(endpoint)
        interceptors = _aio_interceptors(extended) if extended is not None else None
        if tls is None:
            return grpc.aio.insecure_channel(endpoint.target, list(options), interceptors=interceptors)
        return grpc.aio.secure_channel(endpoint.target, tls, _with_name(endpoint, options), interceptors=interceptors)

    def tls_name(self, endpoint: Endpoint) -> str:
        """Returns the name that the server's certificate must have; "" without TLS."""
        return (endpoint.tls_name or endpoint.host) if self.is_tls(endpoint) else ""

    def socket_context(self, protocol: str) -> ssl.SSLContext:
        """Returns the TLS 1.3 context of a connection of the socket protocol (`socket_frames`).

        `protocol` is the name of its application protocol (ALPN). Raises CredentialsError.
        """
        try:
            for path in filter(None, (None if self.ca == _SYSTEM else self.ca, self.cert, self.key)):
                check_trusted(_expanded(path) or "")
            context = ssl.create_default_context(cafile=None if self.ca == _SYSTEM else _expanded(self.ca))
            # As gRPC verifies: an intermediate CA suffices, and a CA needs no key usage.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.set_alpn_protocols([protocol])
            if self.cert is not None:
                context.load_cert_chain(_expanded(self.cert) or "", _expanded(self.key))
        except (OSError, ssl.SSLError) as error:
            raise CredentialsError(f"TLS: {_describe(error, 'the files cannot be used')}") from None
        return context

    def socket_token(self) -> str:
        """Returns the token for the socket protocol, "" without one. Raises CredentialsError."""
        if self.token is None and self.token_file is not None:
            return _socket_token_file(self.token_file)().removeprefix("Bearer ")
        return self._bearer()().removeprefix("Bearer ") if self.has_token else ""

    def check(self, endpoint: Endpoint) -> None:
        """Raises CredentialsError if the credentials cannot be used with this endpoint."""
        if (self.cert is None) != (self.key is None):
            raise CredentialsError("only one of `cert` and `key` is given: a certificate needs its key")
        if self.has_token and not (endpoint.is_unix or self.is_tls(endpoint) or self.insecure):
            raise CredentialsError(
                f"the token is not sent to {endpoint} without TLS: give the `ca` of the server, or set `insecure`"
            )

    def _tls(self, endpoint: Endpoint) -> grpc.ChannelCredentials | None:
        self.check(endpoint)
        if not self.is_tls(endpoint):
            return None
        ca = None if self.ca == _SYSTEM else self.ca
        roots = _read_pem("ca", ca, b"CERTIFICATE")
        chain = _read_pem("cert", self.cert, b"CERTIFICATE")
        key = _read_pem("key", self.key, b"PRIVATE KEY")
        _check_pair(self.cert, self.key)
        return grpc.ssl_channel_credentials(root_certificates=roots, private_key=key, certificate_chain=chain)

    def _extended(self, endpoint: Endpoint) -> Callable[[Any], Any] | None:
        """Returns a function that checks a call and adds the token to its details, if necessary."""
        bearer = self._bearer() if self.has_token else None
        path = endpoint.path
        guard = _SocketGuard(path) if path is not None and not is_chosen(path, endpoint) else None
        if bearer is None and guard is None:
            return None

        def extended(details: Any) -> Any:
            if guard is not None:
                guard.check()
            return details if bearer is None else _with(details, bearer())

        return extended

    def _bearer(self) -> Callable[[], str]:
        """Returns a function that returns the value of the `authorization` metadata.

        Reads the token file now, so that an unreadable file is reported before the first call.
        """
        if self.token is not None:
            value = f"Bearer {_checked(self.token, 'the token')}"
            return lambda: value
        source = _TokenFile(self.token_file or "")
        source()
        return source


class _SocketGuard:
    """Refuses gRPC calls if another user can answer at a Unix socket.

    gRPC does not show the user of its peer. But if only this user and root can change the
    directory, the socket in it is theirs.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._logged = ""

    def check(self) -> None:
        try:
            check_path(self._path)
        except OSError as error:
            text = f"not connected to {self._path}: {error.strerror or error}"
            if isinstance(error, ForeignSocketError) and text != self._logged:
                self._logged = text
                _log.warning("kvtier: %s", text)
            none = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details=text) from None


class _TokenFile:
    """Token in a file. If the file changes and cannot be read, the last token stays in use."""

    def __init__(self, path: str) -> None:
        self._path = os.path.expanduser(path)  # noqa: PTH111 - as with `os.stat` below
        self._seen: tuple[int, ...] | None = None
        self._value = ""
        self._logged: tuple[int, ...] | None = None
        """Version of the file whose error was logged."""

    def __call__(self) -> str:
        seen: tuple[int, ...] = ()
        try:
            status = os.stat(self._path)  # noqa: PTH116 - once per call: half the time of Path.stat
            seen = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
            if seen != self._seen:
                text = _read("token_file", self._path).decode(errors="replace").strip()
                self._value, self._seen = f"Bearer {_checked(text, 'its content')}", seen
        except (OSError, CredentialsError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            if not self._value:
                raise CredentialsError(f"token_file {self._path}: {reason}") from None
            if seen != self._logged:
                _log.error("token_file %s: %s; the previous token stays in use", self._path, reason)
                self._logged = seen
        return self._value


def _with_name(endpoint: Endpoint, options: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [*options, ("grpc.ssl_target_name_override", endpoint.tls_name)] if endpoint.tls_name else list(options)


def _expanded(path: str | None) -> str | None:
    return None if path is None else os.path.expanduser(path)  # noqa: PTH111 - accepts what gRPC's path accepts


@functools.lru_cache(maxsize=64)
def _socket_token_file(path: str) -> _TokenFile:
    """Returns one object per file, so that it keeps the last token of an unreadable file."""
    return _TokenFile(path)


def _checked(token: str, what: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise CredentialsError(f"{what} is not a token: it must be one line of printable characters without spaces")
    return token


def _read(name: str, path: str) -> bytes:
    try:
        return read_trusted(Path(path).expanduser(), _MAX_FILE_BYTES)
    except (OSError, RuntimeError) as error:
        raise CredentialsError(f"{name} {path}: {getattr(error, 'strerror', None) or error}") from None


def _read_pem(name: str, path: str | None, kind: bytes) -> bytes | None:
    """Returns a PEM file. Raises CredentialsError if the file has no object of this kind.

    Without this check gRPC would only report that the server is unavailable.
    """
    if path is None:
        return None
    contents = _read(name, path)
    if kind + b"-----" not in contents:
        raise CredentialsError(f"{name} {path}: the file has no {kind.decode().lower()} in PEM format")
    return contents


def _check_pair(cert: str | None, key: str | None) -> None:
    """Raises CredentialsError if key and certificate do not match. Pipes are not checked."""
    if cert is None or key is None:
        return
    cert_path, key_path = (Path(path).expanduser() for path in (cert, key))
    if not (cert_path.is_file() and key_path.is_file()):
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("ALL:@SECLEVEL=0")  # accept any key length here: the server decides
    try:
        check_pair(str(cert_path), str(key_path), context)
    except PairError as error:
        raise CredentialsError(f"cert {cert}, key {key}: {error}") from None
    except PemError:
        pass  # gRPC may accept the files; otherwise it reports a failed connection


def _with(details: Any, value: str) -> Any:
    """Returns the call details with the token added to the metadata."""
    metadata = [*(details.metadata or ()), ("authorization", value)]
    of_aio: Any = grpc.aio.ClientCallDetails
    if isinstance(details, of_aio):
        return details._replace(metadata=grpc.aio.Metadata(*metadata))
    unchanged = ("method", "timeout", "credentials", "wait_for_ready", "compression")
    return SimpleNamespace(metadata=metadata, **{name: getattr(details, name, None) for name in unchanged})


class _Interceptor(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]  # grpc has no types
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    def __init__(self, extended: Callable[[Any], Any]) -> None:
        self._extended = extended

    def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._extended(details), request)

    intercept_unary_unary = _intercept  # pyright: ignore[reportAssignmentType]
    intercept_unary_stream = _intercept  # pyright: ignore[reportAssignmentType]
    intercept_stream_unary = _intercept  # pyright: ignore[reportAssignmentType]
    intercept_stream_stream = _intercept  # pyright: ignore[reportAssignmentType]


def _aio_interceptors(extended: Callable[[Any], Any]) -> list[Any]:
    """Returns one interceptor per kind of call, because grpc.aio allows only one kind per class."""

    async def intercept(_: Any, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(extended(details), request)

    kinds = (
        ("intercept_unary_unary", grpc.aio.UnaryUnaryClientInterceptor),
        ("intercept_unary_stream", grpc.aio.UnaryStreamClientInterceptor),
        ("intercept_stream_unary", grpc.aio.StreamUnaryClientInterceptor),
        ("intercept_stream_stream", grpc.aio.StreamStreamClientInterceptor),
    )
    return [type("_AioInterceptor", (kind,), {name: intercept})() for name, kind in kinds]


def check_certificates(path: str) -> None:
    """Raises PemError if a file has no valid certificate."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:  # includes ssl.SSLError
        raise PemError(f"no certificates in PEM format: {_describe(error, 'damaged')}") from None


def check_pair(cert: str, key: str, context: ssl.SSLContext) -> None:
    """Loads a certificate and its key into `context`. Raises PemError, PairError."""
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except PairError:
        raise
    except (OSError, ValueError) as error:
        if getattr(error, "reason", "") == _MISMATCH:
            raise PairError(f"the key is not this certificate's ({_MISMATCH})") from None
        raise PemError(_describe(error, "the key is not a private key in PEM format")) from None


def _no_password() -> str:
    raise PairError("the key has a password")


def _describe(error: Exception, otherwise: str) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "NO_CERTIFICATE_OR_CRL_FOUND":
            return "the file contains no certificate"
        return error.reason or otherwise
    return (isinstance(error, OSError) and error.strerror) or str(error)
