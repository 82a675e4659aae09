"""Settings of the publisher of events."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from .annotations import _setting, _size
from .units import GIB, MIB

__all__ = ["EventConfig"]


class EventConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Events of the tiers over ZeroMQ, for routers and indexers (`kvtier[events]`)."""

    publish: Annotated[
        str | None,
        _setting(
            "Address on which the server publishes events, like `tcp://127.0.0.1:5557` or `ipc:///PATH`. An ipc socket "
            "can be opened by the server's user only. A tcp address needs `events.keys` or `events.insecure`."
        ),
    ] = None
    replay: Annotated[
        str | None, _setting("Address on which clients request messages that they have missed, like `publish`.")
    ] = None
    keys: Annotated[
        Path | None,
        _setting(
            "File with the keys that authenticate readers on tcp addresses by ZeroMQ's CURVE (TOML, readable by its owner "
            "only). The server reads it again when it changes.",
            default="no authentication",
        ),
    ] = None
    insecure: Annotated[
        bool,
        _setting(
            "Allow tcp addresses without `events.keys`: every process that reaches them can read the events of all "
            "tenants. `insecure` allows them, too."
        ),
    ] = False
    max_readers: Annotated[
        int,
        _setting(
            "Maximum number of readers of each address. Readers of one IP address (IPv6: of one /64 network) may be half "
            "of them.",
            ge=1,
            le=4096,
        ),
    ] = 128
    topic: Annotated[
        str,
        _setting("Topic of namespaces for which no engine has declared an address. For a tenant, `@TENANT` follows."),
    ] = "kvtier"
    format: Annotated[
        Literal["map", "array"],
        _setting("Form of an event: `map` (fields by name, vLLM 0.33) or `array` (fields by position, older routers)."),
    ] = "map"
    hashes: Annotated[
        Literal["int", "bytes"],
        _setting(
            "Form of a block hash: `int` (its last 8 bytes as a number, like vLLM) or `bytes` (the whole hash, like vLLM "
            "with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`)."
        ),
    ] = "int"
    buffer: Annotated[
        int,
        _size("Maximum size of the latest messages, kept for readers that are slow or ask for a `replay`.", MIB, GIB),
    ] = 64 * MIB
    token_memory: Annotated[
        int,
        _size(
            "Maximum memory for the token ids of blocks, which indexers such as Dynamo need: 400 bytes per block of 16 "
            "tokens. Used only if engines send token ids (`publish_token_ids`). 0 keeps none.",
            0,
            64 * GIB,
        ),
    ] = 256 * MIB
