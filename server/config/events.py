"""Settings of the publisher of events."""

from __future__ import annotations

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
            "Address on which the server publishes events, like `tcp://127.0.0.1:5557` or `ipc:///PATH`. Clients need "
            "no credentials to read the events of all tenants."
        ),
    ] = None
    replay: Annotated[
        str | None, _setting("Address on which clients request messages that they have missed, like `publish`.")
    ] = None
    topic: Annotated[str, _setting("Topic of namespaces for which no engine has declared an address.")] = "kvtier"
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
    buffer: Annotated[int, _size("Maximum size of the latest messages, kept for `replay`.", MIB, GIB)] = 64 * MIB
    token_memory: Annotated[
        int,
        _size(
            "Maximum memory for the token ids of blocks, which indexers such as Dynamo need: 400 bytes per block of 16 "
            "tokens. Used only if engines send token ids (`publish_token_ids`). 0 keeps none.",
            0,
            64 * GIB,
        ),
    ] = 256 * MIB
