"""What the server is told of a request, so that its tiers can vote on how it is offloaded, and hear of its end."""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .... import OffloadPolicy
from ..request_settings import RequestSettings

__all__ = ["Announcement", "plain_params", "server_name"]

# Less than what the server takes, which is 512.
_MAX_ID_CHARACTERS = 256
# Users send them. What a tier votes by is a flag or two.
_MAX_PARAMS_CHARACTERS = 64 << 10
_MAX_PRIORITY = (1 << 31) - 1


@dataclass
class Announcement:
    """What the server is told of a request, and says of it: begun with its first lookup, finished after its last store (B3.12).

    ``request_id`` is how the server knows it (``server_name``). ``priority``: higher is more urgent, the server's rules may ask for
    it. ``settings``: what its user asked for.

    ``policy`` is how the server's tiers want it offloaded, once they were asked. ``voting``: they are being asked by a call of its
    own, not by a lookup that the request waits for; its blocks are offered after that. ``unasked``: there was nobody to look it up.
    """

    request_id: str
    prompt_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    settings: RequestSettings = field(default_factory=RequestSettings)
    priority: int = 0
    policy: OffloadPolicy | None = None
    voting: bool = False
    unasked: bool = False
    # Under the service's lock:
    begun: bool = False
    ended: bool = False
    pending: int = 0

    def lookup_options(self) -> dict[str, Any]:
        """What every lookup of it says besides its keys."""
        tiers = self.settings.tier_filter
        return {} if tiers is None else {"exclude": tiers}

    def begin_options(self) -> dict[str, Any]:
        """What its announcement says besides; the server applies ``retain_for`` to all its later lookups and stores."""
        options: dict[str, Any] = {}
        if self.settings.retain_for_s is not None:
            options["retain_for"] = self.settings.retain_for_s
        if self.priority:
            options["priority"] = max(-_MAX_PRIORITY, min(_MAX_PRIORITY, self.priority))
        return options

    @property
    def wants_all(self) -> bool:
        """Whether some tier asks for every block, those that were loaded included (B1.1, B1.6)."""
        return self.policy is OffloadPolicy.REQUEST_LEVEL


def server_name(request_id: str) -> str:
    """Returns how the server is told of a request: by its id; a long one, which may be of a user's making, ends in its hash."""
    if len(request_id) <= _MAX_ID_CHARACTERS:
        return request_id
    digest = hashlib.sha256(request_id.encode(errors="surrogatepass")).hexdigest()
    return f"{request_id[: _MAX_ID_CHARACTERS - len(digest) - 1]}-{digest}"


def plain_params(params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns ``params`` where they can be sent as JSON and are not overlong; others are between this engine and its peers."""
    try:
        text = json.dumps(params)
    except (TypeError, ValueError, RecursionError):
        return None
    return params if len(text) <= _MAX_PARAMS_CHARACTERS else None
