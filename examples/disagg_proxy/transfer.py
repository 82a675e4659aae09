"""`kv_transfer_params`: tell an engine about another engine's blocks (B2.18, B2.22, B2.24)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Address",
    "EngineIdentity",
    "Params",
    "first_turn",
    "for_engine",
    "hold_only",
    "is_usable",
    "next_turn",
    "overlapping",
    "own_params",
    "with_conversation",
    "with_source",
]

Params = Mapping[str, Any]

_REMOTE = (
    "remote_engine_id",
    "remote_request_id",
    "remote_block_ids",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
)
_NOT_FOR_CLIENTS = {"do_remote_prefill", "do_remote_decode", "tp_size"}
_SETTINGS = "kvtier"
_HOLD_AS = "hold_as"
_HOLD = "hold"
_SOURCE = "source"
_CONVERSATION_ID = "conversation_id"


@dataclass(frozen=True)
class Address:
    """Address of a kvtier server: a host and its port, or `unix:PATH` and 0."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parses `host:port` or `unix:PATH`; raises ValueError."""
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(text, 0)
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"{text!r} is neither host:port nor unix:PATH")
        return cls(host.strip("[]"), int(port))

    def replacing(self, params: Params) -> Params:
        """Returns `params` with this address as the address of the blocks' server (B2.22)."""
        return {**params, "remote_host": self.host, "remote_port": self.port}


@dataclass(frozen=True)
class EngineIdentity:
    """Identity that an engine reported. Sufficient to refer to a hold with a known name."""

    engine_id: str
    host: str
    port: int
    tp_size: int | None

    @classmethod
    def parse(cls, params: object) -> EngineIdentity | None:
        """Parses the engine's parameters. Returns None if the identity is missing."""
        if not isinstance(params, Mapping):
            return None
        engine_id, host, port = (params.get(f"remote_{name}") for name in ("engine_id", "host", "port"))
        if not (isinstance(engine_id, str) and engine_id and isinstance(host, str) and host and isinstance(port, int)):
            return None
        tp_size = params.get("tp_size")
        return cls(engine_id, host, port, tp_size if isinstance(tp_size, int) else None)

    def named_hold(self, name: str, num_tokens: int) -> Params:
        """Returns the parameters of a request that this engine was told to hold as `name`.

        `remote_block_ids` is a placeholder, because the claim returns the blocks.
        """
        return {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [[0]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.tp_size,
            "remote_num_tokens": num_tokens,
        }

    def early_hold(self, name: str) -> Params:
        """Returns D's parameters of a request that this P computes at the same time."""
        hold = self.named_hold(name, 0)
        return overlapping({**hold, "do_remote_prefill": True, "do_remote_decode": False})


def first_turn() -> Params:
    """Returns P's parameters for a first turn: all remote fields are None (B2.24)."""
    return {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(_REMOTE)}


def next_turn(hold: Params) -> Params:
    """Returns P's parameters if D holds the previous turn."""
    return {**hold, "do_remote_decode": True, "do_remote_prefill": False}


def overlapping(params: Params) -> Params:
    """Returns the parameters if both engines get the request at the same time."""
    return {**params, "remote_overlap": True}


def hold_only() -> Params:
    """Returns D's parameters if there is nothing to pull: D computes and holds the prompt."""
    return {"do_remote_decode": False, "do_remote_prefill": True, **dict.fromkeys(_REMOTE)}


def is_usable(params: object) -> bool:
    """Whether an engine's answer names blocks that another engine could pull (B2.3)."""
    if not isinstance(params, Mapping) or EngineIdentity.parse(params) is None or not params.get("remote_request_id"):
        return False
    blocks, num_tokens = params.get("remote_block_ids"), params.get("remote_num_tokens")
    named = isinstance(blocks, list) and any(isinstance(group, list) and group for group in blocks)
    return named and isinstance(num_tokens, int) and num_tokens > 0


def own_params(given: object) -> Params:
    """Returns the client's parameters without those that only the proxy may set."""
    if not isinstance(given, Mapping):
        return {}
    own = {
        name: value for name, value in given.items() if name not in _NOT_FOR_CLIENTS and not name.startswith("remote_")
    }
    settings = own.get(_SETTINGS)
    if isinstance(settings, Mapping):
        own[_SETTINGS] = {name: value for name, value in settings.items() if name != _HOLD_AS}
    return own


def with_source(own: Params, source: str) -> Params:
    """Returns parameters that name a kvtier server, `HOST:PORT`, as the source of missing blocks.

    Raises ValueError.
    """
    if not Address.parse(source).port:
        raise ValueError(f"{source!r} is not host:port")
    return _with_settings(own, {_SOURCE: source})


def with_conversation(own: Params, server_name: str) -> Params:
    """Returns parameters that name the conversation of the request."""
    return _with_settings(own, {_CONVERSATION_ID: server_name})


def for_engine(params: Params, own: Params, hold_as: str | None = None, *, holds: bool = True) -> Params:
    """Returns one engine's parameters: the proxy's, the client's own, and a name for the hold.

    `holds`: whether a later turn can use the hold; False without a conversation.
    """
    ours: Params = {_HOLD_AS: hold_as} if hold_as is not None else {} if holds else {_HOLD: False}
    return {**(_with_settings(own, ours) if ours else own), **params}


def _with_settings(own: Params, settings: Params) -> Params:
    """Returns `own` with these settings of kvtier in addition."""
    given = own.get(_SETTINGS)
    return {**own, _SETTINGS: {**(given if isinstance(given, Mapping) else {}), **settings}}
