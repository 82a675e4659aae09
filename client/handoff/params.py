"""Parser of ``kv_transfer_params`` with vLLM's key names (B2.3, B2.18).

Invalid values count as absent, because the parameters come from other machines through a proxy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["RemoteRequest", "TransferParams"]

# The server's limit. Longer names count as absent: a heartbeat call contains the names of many
# requests, and the server would refuse the whole call because of one name that is too long.
_MAX_NAME_LENGTH = 512
_PEER_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass(frozen=True)
class RemoteRequest:
    """A request of another engine, and the address of the server that holds the request."""

    engine_id: str
    request_id: str
    host: str
    port: int


@dataclass(frozen=True)
class TransferParams:
    """Parsed parameters of a request.

    ``do_remote_prefill``: a peer has computed the prompt; this engine pulls the prompt's blocks.
    ``do_remote_decode``: this engine computes the prompt and holds its blocks for a peer.
    ``remote``: the peer's request, if all four keys of the peer are given.
    ``has_blocks``: whether ``remote_block_ids`` names a block.
    ``num_tokens``: number of tokens for which the peer has blocks.
    ``expiry_time``: when the hold expires, in seconds since 1970; None if not given.
    ``holds_nothing``: the peer lists groups without any block, so nothing can be pulled.
    ``has_no_peer``: all four keys of the peer are given, with the value None.
    ``overlap``: both engines got the request at the same time. So a prefill engine publishes its
    hold when the request arrives, and a decode engine pulls while the prefill engine computes.
    """

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote: RemoteRequest | None = None
    has_blocks: bool = False
    num_tokens: int = 0
    expiry_time: float | None = None
    holds_nothing: bool = False
    has_no_peer: bool = False
    overlap: bool = False

    @property
    def pulls_early(self) -> bool:
        """Whether this engine pulls blocks while the peer still computes others."""
        return self.overlap and self.do_remote_prefill

    @property
    def holds_early(self) -> bool:
        """Whether a peer pulls this request's blocks while this engine still computes others."""
        return self.overlap and self.do_remote_decode

    @classmethod
    def parse(cls, raw: object) -> TransferParams | None:
        """Parses ``kv_transfer_params``. None if they are empty or no mapping (B1.2, B2.13)."""
        if not isinstance(raw, Mapping) or not raw:
            return None
        groups = _groups(raw.get("remote_block_ids"))
        return cls(
            do_remote_prefill=bool(raw.get("do_remote_prefill")),
            do_remote_decode=bool(raw.get("do_remote_decode")),
            remote=_remote(raw),
            has_blocks=any(map(len, groups)),
            num_tokens=int(_number(raw.get("remote_num_tokens")) or 0),
            expiry_time=_number(raw.get("remote_blocks_expiry_time")),
            holds_nothing=bool(groups) and not any(map(len, groups)),
            has_no_peer=all(raw.get(name, "") is None for name in _PEER_KEYS),
            overlap=bool(raw.get("remote_overlap")),
        )


def _remote(raw: Mapping[Any, Any]) -> RemoteRequest | None:
    engine_id, request_id, host = (_text(raw.get(f"remote_{name}")) for name in ("engine_id", "request_id", "host"))
    port = _number(raw.get("remote_port"))
    if not (engine_id and request_id and host) or port is None or not 0 <= port < 1 << 16:
        return None
    return RemoteRequest(engine_id, request_id, host, int(port))


def _text(value: object) -> str:
    """Returns a name that can be sent to a server. For other values returns "".

    JSON may contain a lone surrogate, which cannot be encoded as UTF-8.
    """
    if not isinstance(value, str) or len(value) > _MAX_NAME_LENGTH:
        return ""
    return "" if any("\ud800" <= character <= "\udfff" for character in value) else value


def _groups(block_ids: object) -> list[Sequence[Any]]:
    """Returns the block ids per group; an empty list if `block_ids` is not a list of lists."""
    groups = block_ids if isinstance(block_ids, list | tuple) else ()
    return [group for group in groups if isinstance(group, list | tuple)]


def _number(value: object) -> float | None:
    """Returns a finite number, also from text such as a port; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
