"""Checks of a configuration beyond the types and bounds of single values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from ...cuda.host.numa import read_placement
from ...protos.endpoint import parse_endpoint
from ...protos.peer_directory import peer_entry
from ...tiers.core.handoffs import EXPIRY_MARGIN_SECONDS
from .fields import SETTINGS, Setting
from .machine import memory_bytes
from .peers import PEERS_TIER
from .schema import Config, TierConfig
from .units import format_size, human_size

__all__ = ["conflicts", "proxy_warnings", "read_value", "warnings"]

_KEY_OVERHEAD_BYTES = 8
"""Bytes of a key in a message besides the key itself: a length, and a position in a publication."""
_MESSAGE_OVERHEAD_BYTES = 16 * 1024
"""Bytes of the largest request besides the keys."""
_PROVIDERS = {
    "s3": "s3.amazonaws.com",
    "gs": "storage.googleapis.com",
    "az": "blob.core.windows.net",
}
"""Host of each provider, or the end of its hosts' names."""


def read_value(setting: Setting, value: Any, *, is_text: bool = False) -> Any:
    """Checks and returns one value; addresses in their standard form. Raises `ValueError`."""
    if setting.key == "listen":
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")] if is_text else [value]
        listen = setting.read(value)
        if not listen:
            raise ValueError("must name at least one address")
        return tuple(dict.fromkeys(str(parse_endpoint(address)) for address in listen))
    if setting.key == "peers.servers":
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()] if is_text else [value]
        return tuple(dict.fromkeys(str(peer_entry(address)) for address in setting.read(value)))
    result = setting.read(value, is_text=is_text)
    check = _CHECKS.get(setting.key)
    return result if check is None or result is None else check(result)


def _numa_nodes(value: str) -> str:
    read_placement(value)
    return value


def _metrics_address(value: str) -> str:
    endpoint = parse_endpoint(value)
    if endpoint.is_unix:
        raise ValueError("must be HOST:PORT: Prometheus cannot scrape a Unix socket")
    return str(endpoint)


def _collector_address(value: str) -> str:
    scheme, _, address = value.partition("://")
    if scheme not in ("http", "https") or parse_endpoint(address).is_unix:
        raise ValueError("must be http://HOST:PORT, or https://HOST:PORT for TLS")
    return value


def _event_address(value: str) -> str:
    scheme, _, address = value.partition("://")
    if scheme not in ("tcp", "ipc") or not address or (scheme == "tcp" and parse_endpoint(address).is_unix):
        raise ValueError("must be tcp://HOST:PORT or ipc://PATH")
    if scheme == "ipc" and address.startswith("@"):
        raise ValueError("must not be an abstract socket, which every user of the host can open: use ipc://PATH")
    return value


_CHECKS: Mapping[str, Callable[[str], str]] = {
    "numa": _numa_nodes,
    "metrics": _metrics_address,
    "tracing.endpoint": _collector_address,
    "events.publish": _event_address,
    "events.replay": _event_address,
}
"""Checks of single values beyond type and bounds. Each returns the value in its standard form."""


def conflicts(values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each conflict between values that are valid on their own."""

    def problem(key: str, why: str) -> str:
        return f"{origins[key]}: {key} = {SETTINGS[key].show(values[key])}: {why}"

    if (memory := memory_bytes()) <= values["region_size"]:
        yield problem("region_size", f"must be less than the memory of this machine, {human_size(memory)}")
    if values["leases.default"] > values["leases.max"]:
        yield problem(
            "leases.default", f"must not exceed leases.max = {SETTINGS['leases.max'].show(values['leases.max'])}"
        )
    yield from _handoff_conflicts(values, problem)
    yield from _peer_conflicts(values, problem)
    needed = _MESSAGE_OVERHEAD_BYTES + max(
        values["limits.max_keys"] * (values["limits.max_key_bytes"] + _KEY_OVERHEAD_BYTES),
        values["limits.max_frame_bytes"],
    )
    if values["limits.max_message_bytes"] < needed:
        least = format_size(-(-needed // 1024) * 1024)
        why = f"must be at least {least}, to hold max_keys keys of max_key_bytes, and a frame of max_frame_bytes"
        yield problem("limits.max_message_bytes", why)
    yield from _trust_conflicts(values, origins, problem)
    yield from _event_conflicts(values, problem)


def _trust_conflicts(
    values: Mapping[str, Any], origins: Mapping[str, str], problem: Callable[[str, str], str]
) -> Iterator[str]:
    """Yields a line for incomplete TLS and token settings, and for unprotected TCP addresses."""
    cert, key = values["tls.cert"], values["tls.key"]
    if (cert is None) != (key is None):
        given, missing = ("tls.cert", "tls.key") if key is None else ("tls.key", "tls.cert")
        yield problem(given, f"needs {missing} too")
    if values["tls.client_ca"] is not None and cert is None:
        yield problem("tls.client_ca", "needs tls.cert and tls.key")
    for switch in ("auth.unix", "auth.metrics"):
        if values[switch] and values["auth.tokens"] is None:
            yield problem(switch, "needs auth.tokens, a token file")
    if values["insecure"]:
        return
    remedy = "use a Unix socket, or set --insecure"
    for address in values["listen"]:
        if parse_endpoint(address).is_unix:
            continue
        where = f"{origins['listen']}: listen = {address}"
        if cert is None:
            reach = "every user of this host" if parse_endpoint(address).is_loopback else "everyone on the network"
            yield f"{where}: {reach} could read and write the cache unencrypted; set tls.cert and tls.key, {remedy}"
        elif values["auth.tokens"] is None and values["tls.client_ca"] is None:
            yield f"{where}: clients are not authenticated; set auth.tokens or tls.client_ca, {remedy}"


def _event_conflicts(values: Mapping[str, Any], problem: Callable[[str, str], str]) -> Iterator[str]:
    """Yields a line for incomplete settings, and for TCP addresses without authentication."""
    for key in ("events.replay", "events.keys"):
        if values[key] is not None and values["events.publish"] is None:
            yield problem(key, "needs events.publish")
    if values["events.keys"] is not None or values["events.insecure"] or values["insecure"]:
        return
    for key in ("events.publish", "events.replay"):
        if (values[key] or "").startswith("tcp://"):
            why = "could read the events of all tenants; set events.keys, use ipc://, or set events.insecure"
            yield problem(key, f"{_reach(values[key])} {why}")


def _handoff_conflicts(values: Mapping[str, Any], problem: Callable[[str, str], str]) -> Iterator[str]:
    if values["handoff.default"] > values["handoff.max"]:
        longest = SETTINGS["handoff.max"].show(values["handoff.max"])
        yield problem("handoff.default", f"must not exceed handoff.max = {longest}")
    for key in ("handoff.default", "handoff.max"):
        if values[key] <= EXPIRY_MARGIN_SECONDS:
            yield problem(key, f"must be more than {EXPIRY_MARGIN_SECONDS:g} s: a hold near its end cannot be claimed")


def _peer_conflicts(values: Mapping[str, Any], problem: Callable[[str, str], str]) -> Iterator[str]:
    """Yields a line for settings of `[peers]` that contradict each other or the tiers."""
    if (values["peers.cert"] is None) != (values["peers.key"] is None):
        given, missing = ("peers.cert", "peers.key") if values["peers.key"] is None else ("peers.key", "peers.cert")
        yield problem(given, f"needs {missing} too")
    is_tls = values["peers.ca"] is not None or values["peers.cert"] is not None
    if values["peers.token_file"] is not None and not is_tls and not values["insecure"]:
        yield problem("peers.token_file", "the token is not sent without TLS: set peers.ca, or set --insecure")
    if values["peers.servers"] and any(tier.name == PEERS_TIER for tier in values["tiers"]):
        yield problem("peers.servers", f"the tier of these servers is called {PEERS_TIER}: rename the other tier")
    if values["peers.servers"] and values["peers.deadline"] >= values["limits.tier_stall"]:
        yield problem("peers.deadline", "must be less than limits.tier_stall")


def _reach(address: str) -> str:
    endpoint = parse_endpoint(address.removeprefix("tcp://"))
    return "every user of this host" if endpoint.is_loopback else "everyone on the network"


def warnings(config: Config) -> Iterator[str]:
    """Yields a warning for each setting that is permitted, but perhaps a mistake."""
    yield from _listen_warnings(config)
    if config.metrics is not None and not config.auth.metrics and not parse_endpoint(config.metrics).is_loopback:
        yield f"metrics on {config.metrics}: the whole network can see models, engines and tenants; see auth.metrics"
    for address in (config.events.publish, config.events.replay):
        if address is not None and address.startswith("tcp://") and config.events.keys is None:
            yield f"events on {address}: {_reach(address)} can read the block hashes of all tenants"
    if config.region_size > memory_bytes() // 2:
        yield f"region_size = {format_size(config.region_size)} is more than half of this machine's memory"


def _listen_warnings(config: Config) -> Iterator[str]:
    for endpoint in config.endpoints:
        reach = "every user of this host" if endpoint.is_loopback else "everyone on the network"
        if endpoint.is_unix:
            continue
        if config.tls.cert is None and config.authenticates:
            yield f"listening on {endpoint} unencrypted: {reach} can read the traffic, tokens included"
        elif config.tls.cert is None:
            yield f"listening on {endpoint} unencrypted: {reach} can read and write the cache"
        elif not config.authenticates:
            yield f"listening on {endpoint} without authentication: {reach} can read and write the cache"
    if not config.bulk.tcp and any(not endpoint.is_unix for endpoint in config.endpoints):
        yield "bulk.tcp = false: clients of TCP addresses use gRPC streams, which are slower than sockets"


def proxy_warnings(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    """Yields a warning for each configured destination that is reached through a proxy."""
    # All other connections of kvtier ignore proxies. These use them for the loopback too.
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
