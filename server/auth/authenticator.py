"""Who calls: by token, by certificate, or by the socket that only the owner can open."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from ..config.schema import Config
from ..refused import Refused
from ..telemetry.logs import get_logger
from .roles import CALLER, OWNER, Identity, is_open, require_role
from .tokens import TokensError, read_directory

__all__ = ["AuthInterceptor", "Authenticator", "bearer_of", "peer_credentials"]


_BEARER = "bearer "


_MAX_TOKEN_CHARACTERS = 512


def peer_credentials(context: grpc.ServicerContext) -> tuple[str | None, list[str], bool]:
    """Returns what a call shows: a token, the names of a certificate that TLS has verified, whether it came by a Unix socket."""
    token = None
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str):
            token = bearer_of(value)
    is_local = (context.peer() or "").startswith("unix:")
    names: list[str] = []
    if not is_local:
        shown: Any = context.auth_context()
        for kind in ("x509_common_name", "x509_subject_alternative_name"):
            names += [name.decode(errors="replace") for name in shown.get(kind, ())]
    return token, names, is_local


def bearer_of(header: str) -> str | None:
    """Returns the token of an `authorization` header; None for none, "" for what is none."""
    if not header:
        return None
    if header[: len(_BEARER)].lower() != _BEARER or len(header) > _MAX_TOKEN_CHARACTERS:
        return ""
    return header[len(_BEARER) :].strip()


_log = get_logger(__name__)


class Authenticator:
    """Knows the tokens and certificates. Lives on the event loop.

    Raises:
        TokensError: the file cannot be used (at construction; later the one that was read before stays in use).
    """

    def __init__(self, config: Config, clock: Callable[[], float] = time.time) -> None:
        self._path = config.auth.tokens
        self._asks_on_unix = config.auth.unix
        self._clock = clock
        self._seen = _look(self._path)
        self._directory = read_directory(self._path) if self._path is not None else None

    @staticmethod
    def is_wanted(config: Config) -> bool:
        """Returns whether anybody is asked who he is."""
        return config.auth.tokens is not None or config.tls.client_ca is not None

    def identify(self, token: str | None, names: Sequence[str], *, is_local: bool) -> Identity:
        """Returns who has shown a token, or a certificate with these names. Raises Refused."""
        now = self._clock()
        if self._directory is None:
            if names:  # TLS has verified it, and that is all that is asked for
                return Identity(names[0], None, OWNER.roles, shared_memory=True)
        elif token is not None:
            identity = self._directory.of_token(token, now)
            if identity is None:
                raise Refused("UNAUTHENTICATED", "the token is not known here, or has expired")
            return identity
        elif (identity := self._directory.of_names(names, now)) is not None:
            return identity
        if is_local and not self._asks_on_unix:
            return OWNER
        raise Refused("UNAUTHENTICATED", "a token is needed: metadata `authorization: Bearer TOKEN`")

    def still(self, identity: Identity) -> bool:
        """Returns whether somebody who was let in would be let in now, as the same."""
        return self._directory is None or self._directory.still(identity, self._clock())

    def refresh(self) -> None:
        """Reads the file again if it has changed. One that cannot be used leaves what was read before."""
        if self._path is None or (seen := _look(self._path)) == self._seen:
            return
        self._seen = seen
        try:
            self._directory = read_directory(self._path)
        except TokensError as error:
            _log.error("the tokens cannot be read, the old ones stay", error=str(error))
        else:
            _log.info("tokens read again", path=str(self._path), tokens=len(self._directory.tokens))

    def may_see_metrics(self, header: str | None) -> bool:
        """Returns whether an HTTP request with this `Authorization` may see the metrics. Any thread may ask."""
        token, directory = bearer_of(header or ""), self._directory
        identity = directory.of_token(token, self._clock()) if directory is not None and token is not None else None
        return identity is not None and any(role.value in ("metrics", "admin") for role in identity.roles)


class AuthInterceptor:
    """Sees to it that each call is made by somebody who may make it."""

    def __init__(self, authority: Authenticator) -> None:
        self._authority = authority

    def __call__(self, method: str, context: Any) -> None:
        """Finds out who makes a call, for `CALLER`. Raises Refused. `context` is gRPC's, or has a `caller` who is known."""
        method = method.lstrip("/")
        caller = getattr(context, "caller", None)
        if caller is None:
            if is_open(method):
                return
            token, names, is_local = peer_credentials(context)
            caller = self._authority.identify(token, names, is_local=is_local)
        CALLER.set(caller)
        require_role(method, caller)


def _look(path: Path | None) -> tuple[int, ...] | None:
    """Returns what changes with a file; also when only its owner or mode does, and it can be read at last."""
    if path is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
