"""The proxy's settings and command line."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from urllib.parse import urlsplit

from .fleet import Instance, Role
from .transfer import Address

__all__ = ["Engine", "Settings", "parse_arguments"]


@dataclass(frozen=True)
class Engine:
    """An engine. `kvtier`, of a decode engine: address at which P reaches its kvtier server.

    None means the address that the engine reports. `hints`: address at which the proxy reaches the
    kvtier server, for hints about agents; None for no hints.
    """

    url: str
    kvtier: Address | None = None
    hints: str | None = None


@dataclass(frozen=True)
class Settings:
    """Settings of the proxy; times in seconds. README.md describes each setting."""

    prefill: tuple[Engine, ...] = ()
    decode: tuple[Engine, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    prefill_timeout: float = 120.0
    decode_timeout: float = 1800.0
    entry_ttl: float = 450.0
    max_entries: int = 100_000
    state: str | None = None
    tool_time: float = 300.0
    overlap: bool = False
    max_requests: int = 1024
    max_body: int = 32 << 20
    check_interval: float = 5.0
    probe_interval: float = 300.0

    def prefill_instances(self) -> list[Instance]:
        """Returns the prefill engines in their initial state."""
        return [Instance(engine.url, Role.PREFILL, hints=engine.hints) for engine in self.prefill]

    def decode_instances(self) -> list[Instance]:
        """Returns the decode engines in their initial state."""
        return [Instance(engine.url, Role.DECODE, engine.kvtier, engine.hints) for engine in self.decode]

    def hint_servers(self) -> list[str]:
        """Returns the addresses of the kvtier servers that get hints."""
        return sorted({engine.hints for engine in (*self.prefill, *self.decode) if engine.hints is not None})


def parse_arguments(arguments: Sequence[str] | None = None) -> Settings:
    """Parses a command line. Exits the program if the command line is invalid."""
    parser = argparse.ArgumentParser(
        prog="disagg_proxy",
        description="Serves the OpenAI API with separate prefill and decode engines that share KV blocks through kvtier.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    hidden = argparse.SUPPRESS
    add(
        "--prefill",
        action="append",
        type=_prefill,
        default=hidden,
        metavar="URL[,hints=ADDRESS]",
        help="a prefill engine; repeat the option for each engine. The kvtier server at hints= gets hints about agents",
    )
    add(
        "--decode",
        action="append",
        type=_decode,
        default=hidden,
        required=True,
        metavar="URL[,kvtier=ADDRESS][,hints=ADDRESS]",
        help="a decode engine, and the addresses at which P and the proxy reach its kvtier server; repeat the option "
        "for each engine",
    )
    add("--host", metavar="ADDRESS", help="address to listen on")
    add("--port", type=int, help="port to listen on; 0 for any free port")
    add("--prefill-timeout", type=_positive, metavar="SECONDS", help="time limit of a whole prefill")
    add(
        "--decode-timeout",
        type=_positive,
        metavar="SECONDS",
        help="maximum time without data from an engine; without streaming, for the whole answer",
    )
    add("--entry-ttl", type=_positive, metavar="SECONDS", help="lifetime of a turn's entry in the conversation table")
    add("--max-entries", type=_count, metavar="N", help="maximum number of entries in the conversation table")
    add(
        "--state",
        type=_state,
        metavar="URL",
        help="Valkey or Redis server in which several proxies share the conversation table: valkey://host[:port][/database]",
    )
    add(
        "--tool-time",
        type=_positive,
        metavar="SECONDS",
        help="time for which kvtier servers retain the blocks of a conversation while a tool runs",
    )
    add(
        "--overlap",
        action="store_true",
        help="send a request to the decode engine at the same time; it pulls blocks while the prefill engine computes",
    )
    add("--max-requests", type=_count, metavar="N", help="maximum number of concurrent requests")
    add("--max-body", type=_count, metavar="BYTES", help="maximum size of a request's body")
    add("--check-interval", type=_positive, metavar="SECONDS", help="time between two health checks of an engine")
    add(
        "--probe-interval",
        type=_positive,
        metavar="SECONDS",
        help="time between two probes that identify a decode engine",
    )
    lists = ("prefill", "decode")
    parser.set_defaults(**{setting.name: setting.default for setting in fields(Settings) if setting.name not in lists})
    given = vars(parser.parse_args(arguments))
    given.update({name: tuple(given.get(name, ())) for name in lists})
    return Settings(**given)


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0 and not parts.query
    except ValueError:  # invalid port
        is_url = False
    if not is_url:
        raise argparse.ArgumentTypeError(f"{text!r} is not like http://host:port")
    return text.rstrip("/").removesuffix("/v1")


def _state(text: str) -> str:
    scheme = urlsplit(text).scheme
    if scheme not in {"redis", "rediss", "valkey", "valkeys"} or "@" in text:
        raise argparse.ArgumentTypeError("not like valkey://host:port; the password is in REDISCLI_AUTH")
    if find_spec("redis") is None:
        raise argparse.ArgumentTypeError("needs the package redis")
    return text


def _prefill(text: str) -> Engine:
    return _engine(text, {"hints"})


def _decode(text: str) -> Engine:
    return _engine(text, {"kvtier", "hints"})


def _engine(text: str, known: Collection[str]) -> Engine:
    url, *options = text.split(",")
    given: dict[str, Address] = {}
    hints = None
    for option in options:
        name, _, value = option.partition("=")
        if name not in known:
            raise argparse.ArgumentTypeError(f"{option!r} is not like {'=ADDRESS or '.join(sorted(known))}=ADDRESS")
        try:
            given[name] = Address.parse(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if name == "hints":
            hints = value
    if hints is not None and find_spec("kvtier") is None:
        raise argparse.ArgumentTypeError("hints= needs the package kvtier")
    return Engine(_url(url), given.get("kvtier"), hints)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError(text)
    return value
