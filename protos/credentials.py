"""What a client shows a server: who it is, and how it knows whom it talks to. And the channels that carry it.

A certificate authority (`ca`) or a certificate (`cert` and `key`) make TCP a TLS connection. A token goes with every call,
over TLS or a Unix socket; in the clear over TCP only where somebody has said `insecure`.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import grpc

from .endpoint import CREDENTIAL_VARIABLES, Endpoint

__all__ = ["Credentials", "CredentialsError", "PairError", "PemError", "check_certificates", "check_pair"]


_SYSTEM: Final = "system"


_MAX_FILE_BYTES: Final = 1 << 20


class CredentialsError(ValueError):
    """Credentials cannot be used as they are; one line, without a secret in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """A client's credentials; all of them may be absent, as on a Unix socket.

    Attributes:
        ca: file with the certificates (PEM) of who may vouch for the server; "system" for gRPC's own list.
        cert: file with this client's certificate chain (PEM), where the server asks for one.
        key: file with its private key (PEM).
        token: a bearer token, as `kvtier token new` has printed it.
        token_file: file that has it instead; read again whenever it has changed.
        insecure: whether a token may go over TCP in the clear.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    insecure: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Self:
        """Returns what is given, and of the rest what the environment says. A given `token_file` overrules a token from there."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {
            name: environ.get(variable) or None for name, variable in CREDENTIAL_VARIABLES.items()
        }
        values["insecure"] = (values["insecure"] or "").lower() in ("true", "yes", "on", "1")
        if given.get("token") or given.get("token_file"):
            values["token"] = values["token_file"] = None
        return cls(**values | {name: value for name, value in given.items() if value is not None})

    @property
    def has_token(self) -> bool:
        """Whether calls carry a token."""
        return self.token is not None or self.token_file is not None

    def is_tls(self, endpoint: Endpoint) -> bool:
        """Whether a connection to this endpoint is one of TLS."""
        return not endpoint.is_unix and (self.ca is not None or self.cert is not None)

    def channel(self, endpoint: Endpoint, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """Returns a channel to a server. Raises CredentialsError."""
        tls = self._tls(endpoint)
        options = list(options)
        channel = (
            grpc.insecure_channel(endpoint.target, options)
            if tls is None
            else grpc.secure_channel(endpoint.target, tls, options)
        )
        return grpc.intercept_channel(channel, _Bearer(self._bearer())) if self.has_token else channel

    def aio_channel(self, endpoint: Endpoint, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """Returns a channel for asyncio. Raises CredentialsError."""
        tls = self._tls(endpoint)
        interceptors = _aio_bearers(self._bearer()) if self.has_token else None
        if tls is None:
            return grpc.aio.insecure_channel(endpoint.target, list(options), interceptors=interceptors)
        return grpc.aio.secure_channel(endpoint.target, tls, list(options), interceptors=interceptors)

    def check(self, endpoint: Endpoint) -> None:
        """Raises CredentialsError where they cannot be used to talk to this endpoint."""
        if (self.cert is None) != (self.key is None):
            raise CredentialsError("a certificate goes with its key: give both `cert` and `key`, or neither")
        if self.has_token and not (endpoint.is_unix or self.is_tls(endpoint) or self.insecure):
            raise CredentialsError(
                f"the token is not sent to {endpoint} in the clear: give the `ca` of the server, or say `insecure`"
            )

    def _tls(self, endpoint: Endpoint) -> grpc.ChannelCredentials | None:
        self.check(endpoint)
        if not self.is_tls(endpoint):
            return None
        ca = None if self.ca == _SYSTEM else self.ca
        roots, key, chain = _contents("ca", ca), _contents("key", self.key), _contents("cert", self.cert)
        _check_pem("ca", ca, roots, b"CERTIFICATE")
        _check_pem("cert", self.cert, chain, b"CERTIFICATE")
        _check_pem("key", self.key, key, b"PRIVATE KEY")
        _check_pair(self.cert, self.key)
        return grpc.ssl_channel_credentials(root_certificates=roots, private_key=key, certificate_chain=chain)

    def _bearer(self) -> Callable[[], str]:
        """Returns what returns the metadata's value; looks at the file first, to fail early."""
        if self.token is not None:
            value = f"Bearer {_checked(self.token, 'the token')}"
            return lambda: value
        source = _TokenFile(self.token_file or "")
        source()
        return source


class _TokenFile:
    """A token in a file, read again when that has changed. What cannot be read any more is used as it was."""

    def __init__(self, path: str) -> None:
        self._path = os.path.expanduser(path)  # noqa: PTH111 - as with `os.stat` below
        self._seen: tuple[int, int, int] | None = None
        self._value = ""

    def __call__(self) -> str:
        try:
            status = os.stat(self._path)  # noqa: PTH116 - with each call: half the time of a Path
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
            if seen != self._seen:
                text = (_contents("token_file", self._path) or b"").decode(errors="replace").strip()
                self._value, self._seen = f"Bearer {_checked(text, 'what it has')}", seen
        except (OSError, CredentialsError) as error:
            if not self._value:
                why = error.strerror if isinstance(error, OSError) else error
                raise CredentialsError(f"token_file {self._path}: {why}") from None
        return self._value


def _checked(token: str, what: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise CredentialsError(f"{what} is no token: one line of printable characters")
    return token


def _contents(name: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read(_MAX_FILE_BYTES)
    except (OSError, RuntimeError) as error:
        raise CredentialsError(f"{name} {path}: {getattr(error, 'strerror', None) or error}") from None


def _check_pem(name: str, path: str | None, contents: bytes | None, kind: bytes) -> None:
    """Raises CredentialsError for a file without any of what it is for: gRPC reports it as a server that is not there.

    What is damaged behind something sound is not looked at: gRPC goes by the sound part.
    """
    if contents is not None and kind + b"-----" not in contents:
        raise CredentialsError(f"{name} {path}: there is no {kind.decode().lower()} in PEM in it")


def _check_pair(cert: str | None, key: str | None) -> None:
    """Raises CredentialsError for a certificate and a key that do not belong together; a pipe was read already, and is empty."""
    if cert is None or key is None:
        return
    cert_path, key_path = (Path(path).expanduser() for path in (cert, key))
    if not (cert_path.is_file() and key_path.is_file()):
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("ALL:@SECLEVEL=0")  # how long keys must be is for who is shown them
    try:
        check_pair(str(cert_path), str(key_path), context)
    except PairError as error:
        raise CredentialsError(f"cert {cert}, key {key}: {error}") from None
    except PemError:
        pass  # gRPC may take it, and else it says that it does not connect


def _with(details: Any, value: str) -> Any:
    """Returns the details of a call, with the token among its metadata."""
    metadata = [*(details.metadata or ()), ("authorization", value)]
    of_aio: Any = grpc.aio.ClientCallDetails
    if isinstance(details, of_aio):
        return details._replace(metadata=grpc.aio.Metadata(*metadata))
    return _Details(
        details.method,
        details.timeout,
        metadata,
        details.credentials,
        details.wait_for_ready,
        getattr(details, "compression", None),
    )


@dataclass(frozen=True, slots=True)
class _Details(grpc.ClientCallDetails):  # type: ignore[misc]  # grpc has no types
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]  # as above
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Puts a token to every call."""

    def __init__(self, value: Callable[[], str]) -> None:
        self._value = value

    def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_with(details, self._value()), request)

    intercept_unary_unary = _intercept  # pyright: ignore[reportAssignmentType]
    intercept_unary_stream = _intercept  # pyright: ignore[reportAssignmentType]
    intercept_stream_unary = _intercept  # pyright: ignore[reportAssignmentType]
    intercept_stream_stream = _intercept  # pyright: ignore[reportAssignmentType]


def _aio_bearers(value: Callable[[], str]) -> list[Any]:
    """Returns an interceptor for each kind of call: grpc.aio looks at the class, and takes each for one kind only."""

    async def intercept(_: Any, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(_with(details, value()), request)

    kinds = (
        ("intercept_unary_unary", grpc.aio.UnaryUnaryClientInterceptor),
        ("intercept_unary_stream", grpc.aio.UnaryStreamClientInterceptor),
        ("intercept_stream_unary", grpc.aio.StreamUnaryClientInterceptor),
        ("intercept_stream_stream", grpc.aio.StreamStreamClientInterceptor),
    )
    return [type("_AioBearer", (kind,), {name: intercept})() for name, kind in kinds]


_MISMATCH = "KEY_VALUES_MISMATCH"


_SAYINGS = {
    _MISMATCH: f"the key is not this certificate's ({_MISMATCH})",
    "NO_CERTIFICATE_OR_CRL_FOUND": "the file contains no certificate",
}


class PemError(ValueError):
    """A file cannot be used; the message says why, and does not name it."""


class PairError(PemError):
    """A key is another certificate's, or has a password: whoever reads the files, they are of no use."""


def check_certificates(path: str) -> None:
    """Raises PemError if a file has no certificates, or damaged ones."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:  # ssl.SSLError is one
        raise PemError(f"not certificates in PEM: {_said(error, 'damaged')}") from None


def check_pair(cert: str, key: str, context: ssl.SSLContext) -> None:
    """Loads a certificate, of which `check_certificates` thinks well, with its key. Raises PemError, PairError."""
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except PairError:
        raise
    except (OSError, ValueError) as error:
        if getattr(error, "reason", "") == _MISMATCH:
            raise PairError(_SAYINGS[_MISMATCH]) from None
        raise PemError(_said(error, "the key is not a private key in PEM")) from None


def _no_password() -> str:
    raise PairError("the key has a password")


def _said(error: Exception, otherwise: str) -> str:
    if isinstance(error, ssl.SSLError):
        return _SAYINGS.get(error.reason or "", error.reason or otherwise)
    return (isinstance(error, OSError) and error.strerror) or str(error)
