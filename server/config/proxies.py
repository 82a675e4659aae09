"""Warnings about HTTP proxies of the environment, through which libraries of the server connect.

The client of object stores and the exporter of traces read `http_proxy`, `https_proxy`, `all_proxy`
and, for gRPC, `grpc_proxy`. They use them also for the loopback, unless `no_proxy` names the host.
All other connections of kvtier ignore proxies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from .schema import Config, TierConfig

__all__ = ["proxy_warnings"]

_PROVIDERS = {
    "s3": "s3.amazonaws.com",
    "gs": "storage.googleapis.com",
    "az": "blob.core.windows.net",
}
"""Host of each provider, or the end of its hosts' names."""


def proxy_warnings(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    """Yields a warning for each configured destination that is reached through a proxy."""
    for tier in config.tiers:
        if tier.type == "s3" and (url := _store_url(tier)):
            yield from _warning(f"tier {tier.name}: requests", url, (urlsplit(url).scheme, "all"), environ)
    if config.tracing.endpoint is not None:
        yield from _warning(
            f"tracing.endpoint = {config.tracing.endpoint}: spans",
            config.tracing.endpoint,
            ("grpc", "https", "http"),  # the C core of gRPC tries them in this order
            environ,
        )


def _store_url(tier: TierConfig) -> str:
    endpoint = tier.options.get("endpoint")
    provider = _PROVIDERS.get(urlsplit(tier.options["url"]).scheme)
    return str(endpoint or (provider and f"https://{provider}") or "")


def _warning(what: str, url: str, schemes: tuple[str, ...], environ: Mapping[str, str]) -> Iterator[str]:
    names = [name for scheme in schemes for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper())]
    variable = next((name for name in names if environ.get(name)), None)
    host = urlsplit(url).hostname or ""
    if variable is None or _is_excepted(host, environ):
        return
    # Without the value, because it can contain a password.
    yield f"{what} to {host} go through the proxy of {variable}: add {host} to no_proxy if it is reached directly"


def _is_excepted(host: str, environ: Mapping[str, str]) -> bool:
    for entry in (environ.get("no_grpc_proxy") or environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(","):
        name = entry.strip().partition(":")[0].lstrip("*.").lower()
        if entry.strip() == "*" or (name and (host == name or host.endswith(f".{name}"))):
            return True
    return False
