"""The proxy's settings and command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from .fleet import Instance, Role
from .transfer import Address

__all__ = ["Decode", "Settings", "parse_arguments"]


@dataclass(frozen=True)
class Decode:
    """A decode engine: its URL, and its kvtier server's address for others, if it differs."""

    url: str
    kvtier: Address | None = None


@dataclass(frozen=True)
class Settings:
    """Times in seconds. README.md describes each setting."""

    prefill: tuple[str, ...] = ()
    decode: tuple[Decode, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    prefill_timeout: float = 120.0
    decode_timeout: float = 1800.0
    entry_ttl: float = 450.0
    max_entries: int = 100_000
    max_requests: int = 1024
    max_body: int = 32 << 20
    check_interval: float = 5.0
    probe_interval: float = 300.0

    def prefill_instances(self) -> list[Instance]:
        """Returns the prefill engines in their initial state."""
        return [Instance(url, Role.PREFILL) for url in self.prefill]

    def decode_instances(self) -> list[Instance]:
        """Returns the decode engines in their initial state."""
        return [Instance(decode.url, Role.DECODE, decode.kvtier) for decode in self.decode]


def parse_arguments(arguments: Sequence[str] | None = None) -> Settings:
    """Parses a command line; exits the program if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="disagg_proxy",
        description="One OpenAI address for engines that prefill and engines that decode, with kvtier between them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    hidden = argparse.SUPPRESS
    add(
        "--prefill",
        action="append",
        type=_url,
        default=hidden,
        metavar="URL",
        help="an engine that prefills; once for each",
    )
    add(
        "--decode",
        action="append",
        type=_decode,
        default=hidden,
        required=True,
        metavar="URL[,kvtier=ADDRESS]",
        help="an engine that decodes, and how others reach its kvtier server; once for each",
    )
    add("--host", metavar="ADDRESS", help="where to listen")
    add("--port", type=int, help="0 for any that is free")
    add("--prefill-timeout", type=_positive, metavar="SECONDS", help="for a whole prefill")
    add(
        "--decode-timeout",
        type=_positive,
        metavar="SECONDS",
        help="the longest silence of an engine; a whole answer is one",
    )
    add("--entry-ttl", type=_positive, metavar="SECONDS", help="for how long a turn is remembered")
    add("--max-entries", type=_count, metavar="N", help="how many are")
    add("--max-requests", type=_count, metavar="N", help="at once")
    add("--max-body", type=_count, metavar="BYTES", help="of a request")
    add("--check-interval", type=_positive, metavar="SECONDS", help="between two looks at an engine's health")
    add("--probe-interval", type=_positive, metavar="SECONDS", help="between two probes of what a decode engine holds")
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


def _decode(text: str) -> Decode:
    url, *options = text.split(",")
    kvtier = None
    for option in options:
        name, _, value = option.partition("=")
        if name != "kvtier":
            raise argparse.ArgumentTypeError(f"{option!r} is not like kvtier=ADDRESS")
        try:
            kvtier = Address.parse(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return Decode(_url(url), kvtier)


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
