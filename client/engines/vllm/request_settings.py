"""Per-request settings of kvtier: the value of `kv_transfer_params["kvtier"]`.

    {"kv_transfer_params": {
        "kvtier": {"retain_for_s": 600, "exclude": ["lmdb"], "skip_save": true}}}

These settings come from users. An invalid setting is ignored, with one warning per request.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ....protos.endpoint import EndpointError
from ....protos.peer_directory import peer_entry
from ... import Medium, TierFilter

__all__ = ["RequestSettings"]

_KEY = "kvtier"
_MAX_NAMES = 16
_MAX_NAME_CHARACTERS = 128
_MAX_SERVER_CHARACTERS = 300
_MAX_RETAIN_S = 30 * 86400.0
_MAX_TOKENS = 1 << 31
# vLLM 0.33 renamed "block_level" to "chunk_level"; kvtier keeps the older name (B3.1).
_POLICIES = {"block_level": "block_level", "chunk_level": "block_level", "request_level": "request_level"}


@dataclass(frozen=True)
class RequestSettings:
    """One request's settings.

    `retain_for_s`: seconds for which the request's blocks must not be evicted, within the server's
    limits.
    `conversation_id`: name of the conversation of the request, for `ConversationClient`.
    `exclude`, `exclude_media` ("disk", "network"), `exclude_remote`: tiers from which nothing is
    loaded: tiers with these names, tiers on these media, tiers outside the server's host.
    `source`: server of another host (`HOST:PORT`) from which this engine's server loads the blocks
    that it lacks. The server's setting `peers.servers` must permit this source.
    `min_hit_tokens`: a shorter hit counts as a miss.
    `offload_policy`: `request_level` asks the tiers to store every block. The rules of a tier may
    decide otherwise.
    `hold_as`: unique name of the hold if the request is handed off. The request to the next engine
    contains this name as `remote_request_id`. A caller that chooses the name itself can build that
    request before the response to this request arrives.
    `hold`: false prevents a hold at the end of the request, even if other parameters ask for one.
    `skip_load`, `skip_save`: load nothing; store nothing. Lazy mode stores blocks that no longer
    belong to a request, so `skip_save` and `retain_for_s` have no effect in lazy mode. Then a
    conversation has only the blocks that its requests looked up.
    """

    retain_for_s: float | None = None
    conversation_id: str | None = None
    exclude: tuple[str, ...] = ()
    exclude_media: tuple[Medium, ...] = ()
    exclude_remote: bool = False
    source: str = ""
    min_hit_tokens: int = 0
    offload_policy: str | None = None
    hold_as: str | None = None
    hold: bool = True
    skip_load: bool = False
    skip_save: bool = False

    @classmethod
    def parse(cls, params: object, warn: Callable[[str], None]) -> RequestSettings:
        """Parses a request's `kv_transfer_params`. Calls `warn` once if any setting is invalid."""
        given = params.get(_KEY) if isinstance(params, Mapping) else None
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            warn(f"kv_transfer_params[{_KEY!r}] of a request is ignored: it is {reprlib.repr(given)}, not a mapping")
            return cls()
        values: dict[str, Any] = {}
        wrong: list[str] = []
        for name, value in given.items():
            try:
                values[name] = _CHECKS[name](value)
            except KeyError:
                wrong.append(f"{reprlib.repr(name)} is unknown (known: {', '.join(_CHECKS)})")
            except (TypeError, ValueError) as error:
                wrong.append(f"{name} {error}, not {reprlib.repr(value)}")
        if wrong:
            warn(f"settings in kv_transfer_params[{_KEY!r}] of a request are ignored: {'; '.join(wrong[:3])}")
        return cls(**values)

    @property
    def tier_filter(self) -> TierFilter | None:
        if not (self.exclude or self.exclude_media or self.exclude_remote):
            return None
        return TierFilter(self.exclude, self.exclude_media, self.exclude_remote)

    def forwarded_params(self, params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Returns `params` for the server: without these settings, except the offload policy."""
        if not params or _KEY not in params:
            return params
        others = {name: value for name, value in params.items() if name != _KEY}
        return others if self.offload_policy is None else others | {"offload_policy": self.offload_policy}


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("must be true or false")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("must be a number of seconds")
    if not 0 <= value <= _MAX_RETAIN_S:
        raise ValueError(f"must be from 0 to {_MAX_RETAIN_S:g} seconds")
    return float(value)


def _tokens(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_TOKENS:
        raise TypeError("must be a number of tokens")
    return value


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_NAMES or not all(isinstance(x, str) for x in value):
        raise TypeError(f"must be a list of at most {_MAX_NAMES} names")
    if any(len(name) > _MAX_NAME_CHARACTERS for name in value):
        raise ValueError(f"must be names of at most {_MAX_NAME_CHARACTERS} characters")
    return tuple(value)


def _media(value: object) -> tuple[Medium, ...]:
    known = {medium.name.lower(): medium for medium in Medium}
    names = _names(value)
    if not set(names) <= known.keys():
        raise ValueError(f"must be names among {', '.join(known)}")
    return tuple(known[name] for name in names)


def _name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME_CHARACTERS:
        raise TypeError(f"must be a name of at most {_MAX_NAME_CHARACTERS} characters")
    return value


def _server(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_SERVER_CHARACTERS:
        raise TypeError("must be HOST:PORT")
    try:
        return str(peer_entry(value.encode().decode()))  # JSON may contain a lone surrogate
    except (EndpointError, UnicodeError):
        raise ValueError("must be HOST:PORT") from None


def _policy(value: object) -> str:
    if not isinstance(value, str) or value not in _POLICIES:
        raise ValueError(f"must be one of {', '.join(_POLICIES)}")
    return _POLICIES[value]


_CHECKS: Mapping[str, Callable[[object], Any]] = {
    "retain_for_s": _seconds,
    "conversation_id": _name,
    "exclude": _names,
    "exclude_media": _media,
    "exclude_remote": _flag,
    "source": _server,
    "min_hit_tokens": _tokens,
    "offload_policy": _policy,
    "hold_as": _name,
    "hold": _flag,
    "skip_load": _flag,
    "skip_save": _flag,
}
