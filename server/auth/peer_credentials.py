"""What a call shows of who makes it, as gRPC and HTTP bring it. Verified is of that only what TLS has verified."""

from __future__ import annotations

from typing import Any

import grpc

__all__ = ["bearer_of", "credentials_of"]

_BEARER = "bearer "
_MAX_TOKEN_CHARACTERS = 512


def credentials_of(context: grpc.ServicerContext) -> tuple[str | None, list[str], bool]:
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
