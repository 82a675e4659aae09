"""The settings about who may come in: TLS, tokens, and how much a tenant may ask for. Part of `config`'s table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

__all__ = ["AuthConfig", "RateConfig", "TlsConfig", "setting"]

_OFF = '"off"'


def setting(
    doc: str,
    *,
    unit: Literal["bytes", "seconds"] | None = None,
    ge: float | None = None,
    le: float | None = None,
    default: str | None = None,
) -> msgspec.Meta:
    """Describes one field: its meaning, its unit, its bounds and, where the code computes it, its default in words."""
    extra: dict[str, Any] = {"unit": unit, "ge": ge, "le": le, "default": default}
    return msgspec.Meta(description=doc, extra=extra)


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The server's certificate, for TCP. The files are read again when they change."""

    cert: Annotated[
        Path | None, setting("File with the server's certificate chain (PEM): TCP is TLS then.", default=_OFF)
    ] = None
    key: Annotated[Path | None, setting("File with its private key (PEM), without a password.", default=_OFF)] = None
    client_ca: Annotated[
        Path | None,
        setting(
            "File with the certificates (PEM) of who may vouch for clients: all of them need one then.", default=_OFF
        ),
    ] = None


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who may call, and as which tenant. The file is read again when it changes."""

    tokens: Annotated[
        Path | None, setting("File of tokens and certificates, with their tenants and roles.", default=_OFF)
    ] = None
    unix: Annotated[
        bool,
        setting("Whether calls over the Unix socket need a token as well; else it is enough to be able to open it."),
    ] = False
    metrics: Annotated[
        bool,
        setting(
            "Whether the HTTP port asks for a token: role `metrics` or `admin`, but for `/healthz` and an empty page."
        ),
    ] = False


class RateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What each tenant may ask for, all its sessions together; `[tenants.NAME]` has the same for one tenant."""

    calls: Annotated[float | None, setting("Most calls in a second, over ten seconds.", ge=1, le=1e9, default=_OFF)] = (
        None
    )
    bytes: Annotated[
        int | None,
        setting("Most bytes in a second that streams move, over ten seconds.", unit="bytes", ge=1024, default=_OFF),
    ] = None
    sessions: Annotated[int | None, setting("Most sessions that are open at once.", ge=1, le=65536, default=_OFF)] = (
        None
    )
