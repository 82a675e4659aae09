"""Access control: authentication by token, certificate or Unix socket; TLS, rate limits, audit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from ...protos.wire.socket_frames import CALLS_PROTOCOL
from ..config.schema import Config
from ..refused import Refused
from ..telemetry.downgrades import Downgrades, Report
from ..telemetry.logs import get_logger
from .audit_log import AuditLog
from .certificate_names import pem_names
from .credential_files import FileError, ReloadedFile
from .rate_limits import RateLimiters
from .roles import CALLER, OWNER, Identity, Role, is_public, require_role
from .tls_files import ServerContext, TlsError, server_credentials
from .tokens import TokenFile, read_token_file

__all__ = ["AccessControl", "AccessError", "Authenticator", "peer_credentials"]

_log = get_logger(__name__)

_BEARER = "bearer "
_MAX_TOKEN_CHARACTERS = 512


def peer_credentials(context: grpc.ServicerContext) -> tuple[str | None, list[str], bool]:
    """Returns a call's token and certificate names, and whether the call uses a Unix socket."""
    token = None
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str):
            token = _bearer_token(value)
    is_local = (context.peer() or "").startswith("unix:")
    names: list[str] = []
    if not is_local:
        auth_context: Any = context.auth_context()
        names = [name for pem in auth_context.get("x509_pem_cert", ()) for name in pem_names(pem)]
    return token, names, is_local


def _bearer_token(header: str) -> str | None:
    """Returns the token of an `authorization` header; None if there is no header, "" if invalid."""
    if not header:
        return None
    if header[: len(_BEARER)].lower() != _BEARER or len(header) > _MAX_TOKEN_CHARACTERS:
        return ""
    return header[len(_BEARER) :].strip()


class Authenticator:
    """Maps tokens and certificates to identities.

    All calls except `may_see_metrics` must come from the event loop. The constructor raises
    `FileError` if the token file cannot be used. If the file changes later and cannot be used,
    the previous tokens stay valid.
    """

    def __init__(self, config: Config, clock: Callable[[], float] = time.time, report: Report = lambda _: None) -> None:
        """`report`: why the tokens in use are not those of the file."""
        failure, path = "the tokens cannot be read; the previous tokens stay valid", config.auth.tokens
        self._file = None if path is None else ReloadedFile(path, read_token_file, failure, report)
        self._required_on_unix = config.auth.unix
        self._clock = clock

    @property
    def _token_file(self) -> TokenFile | None:
        return None if self._file is None else self._file.content

    def identify(self, token: str | None, names: Sequence[str], *, is_local: bool) -> Identity:
        """Returns the identity of a token, or of certificate names. Raises `Refused`."""
        now = self._clock()
        if self._token_file is None:
            if names:  # TLS has verified the certificate, which is enough if there is no token file
                return Identity(names[0], None, OWNER.roles, shared_memory=True)
        elif token is not None:
            identity = self._token_file.find_token(token, now)
            if identity is None:
                raise Refused("UNAUTHENTICATED", "the token is not known to this server, or has expired")
            return identity
        else:
            identities = self._token_file.find_certificate(names, now)
            if len(identities) > 1:
                text = "several entries of the token file list names of the certificate; only one may"
                raise Refused("UNAUTHENTICATED", text)
            if identities and identities[0] is not None:
                return identities[0]
        if is_local and not self._required_on_unix:
            return OWNER
        raise Refused("UNAUTHENTICATED", "a token is needed: metadata `authorization: Bearer TOKEN`")

    def authorize(self, method: str, context: Any) -> None:
        """Authenticates a call and sets `CALLER`. Raises `Refused` if the call is not permitted.

        `context` is the context of gRPC, or an object with the authenticated `caller`.
        """
        method = method.lstrip("/")
        caller = getattr(context, "caller", None)
        if caller is None:
            if is_public(method):
                return
            token, names, is_local = peer_credentials(context)
            caller = self.identify(token, names, is_local=is_local)
        elif not self.is_still_valid(caller):
            raise Refused("UNAUTHENTICATED", "the token of the connection is no longer valid")
        CALLER.set(caller)
        require_role(method, caller)

    def is_still_valid(self, identity: Identity) -> bool:
        """Returns whether the identity's credential would give the same identity now."""
        return self._token_file is None or self._token_file.is_still_valid(identity, self._clock())

    def tenants(self) -> tuple[set[str], bool]:
        """Returns the tenants whose clients may map shared memory, and whether others may call.

        Others are further tenants, and callers for any tenant.
        """
        sharing: set[str] = set()
        others = not self._required_on_unix
        identities = self._token_file.identities() if self._token_file is not None else []
        users = [each for each in identities if each.roles & {Role.ENGINE, Role.READER}]
        sharing.update(each.tenant for each in users if each.shared_memory and each.tenant is not None)
        return sharing, others or any(each.tenant not in sharing for each in users)

    def refresh(self) -> None:
        """Reads the token file again if it has changed."""
        if self._file is not None and self._file.refresh():
            _log.info("tokens read again", path=str(self._file.path), tokens=len(self._file.content.tokens))

    def may_see_metrics(self, header: str | None) -> bool:
        """Returns whether this `Authorization` header permits reading the metrics. Thread-safe."""
        token, token_file = _bearer_token(header or ""), self._token_file
        identity = token_file.find_token(token, self._clock()) if token_file is not None and token is not None else None
        return identity is not None and any(role.value in ("metrics", "admin") for role in identity.roles)


class AccessError(Exception):
    """A token file or certificate cannot be used; the message is one line."""


class AccessControl:
    """Access control built from the configuration. The constructor raises `AccessError`.

    Without authentication `authenticator` and `authorize` are None, so calls have no extra cost.
    """

    def __init__(self, config: Config, downgrades: Downgrades | None = None) -> None:
        tls, downgrades = config.tls, downgrades or Downgrades()
        remedy = "kvtier doctor --only trust; docs/security.md#tls"
        try:
            self.credentials: grpc.ServerCredentials | None = (
                server_credentials(
                    str(tls.cert),
                    str(tls.key),
                    str(tls.client_ca) if tls.client_ca else None,
                    downgrades.reporter("credentials", remedy, subject="certificate"),
                )
                if tls.cert is not None and tls.key is not None
                else None
            )
            """Credentials of the gRPC endpoints over TCP; None without TLS."""
            report = downgrades.reporter("credentials", remedy, subject="tokens")
            self.authenticator = Authenticator(config, report=report) if config.authenticates else None
            self.tls: ServerContext | None = (
                ServerContext(
                    str(tls.cert), str(tls.key), str(tls.client_ca) if tls.client_ca else None, CALLS_PROTOCOL
                )
                if tls.cert is not None and tls.key is not None
                else None
            )
        except (TlsError, FileError) as error:
            raise AccessError(str(error)) from None
        self.audit_log = AuditLog(logs_reads=self.authenticator is not None)
        self.authorize = self.authenticator.authorize if self.authenticator is not None else None
        self.rate_limiters = RateLimiters(config.rates, {tenant.name: tenant.rates for tenant in config.tenants})
        self._metrics_need_token = config.auth.metrics

    def tenants(self) -> tuple[set[str], bool]:
        """Returns what `Authenticator.tenants` returns; without authentication no tenant."""
        return self.authenticator.tenants() if self.authenticator is not None else (set(), True)

    def may_see_metrics(self, header: str | None) -> bool:
        """Returns whether this `Authorization` header permits reading the metrics. Thread-safe."""
        authenticator = self.authenticator
        return not self._metrics_need_token or (authenticator is not None and authenticator.may_see_metrics(header))

    def refresh(self, revoke: Callable[[Callable[[Identity], bool]], None]) -> None:
        """Reads a changed token file; `revoke` ends sessions whose identity is no longer valid."""
        if self.authenticator is not None:
            self.authenticator.refresh()
            revoke(self.authenticator.is_still_valid)
