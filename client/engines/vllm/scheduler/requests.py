"""Adapter of vLLM's requests for `client/offload` and `client/handoff`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from .....protos.wire.block_contents import BlockContent, pack_tokens
from .... import LeaseOptions, OffloadPolicy, RequestOptions, make_hold_key, make_key
from ....offload import CacheGeometry, CacheGroup
from ..compat import generate_block_hash_extra_keys, resolve_block_hashes
from ..request_settings import RequestSettings

__all__ = ["RequestRegistration", "VllmRequest", "plain_params", "server_name"]

# Maximum length of a request's name; `server_name` shortens longer ids. The server accepts 512.
_MAX_ID_CHARACTERS = 256
# The server does not get longer parameters: users choose them, and tiers need only small flags.
_MAX_PARAMS_CHARACTERS, _MAX_PARAM_CHARACTERS = 16 << 10, 1024
"""Longest text of the parameters, which is the server's limit, and of each parameter. Tiers decide
by flags. Lists of block ids, which other connectors use, have up to 60,000 characters."""
_MAX_PRIORITY = (1 << 31) - 1


@dataclass
class RequestRegistration:
    """Registration of a request at the server: from its first lookup to its last store (B3.12).

    `request_id`: name of the request at the server (`server_name`). `priority`: input for the
    server's rules; a higher number is more urgent. `settings`: the user's settings for the request.

    `policy`: the offload policy for which the server's tiers voted; None before the vote. `voting`:
    a registration without lookup is in flight. Until it ends, no block of the request is saved.
    `counted_unavailable`: the metrics have counted a lookup of this request as `unavailable`.
    """

    request_id: str
    prompt_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    settings: RequestSettings = field(default_factory=RequestSettings)
    priority: int = 0
    policy: OffloadPolicy | None = None
    voting: bool = False
    counted_unavailable: bool = False
    # Protected by RequestCalls' lock:
    registered: bool = False
    ended: bool = False
    pending: int = 0

    def lookup_options(self) -> LeaseOptions:
        options: LeaseOptions = {}
        if (exclude := self.settings.tier_filter) is not None:
            options["exclude"] = exclude
        if self.settings.source:
            options["source"] = self.settings.source
        return options

    def begin_options(self, lookup: LeaseOptions) -> RequestOptions:
        """Options of the registration. `retain_for` then applies to all calls about the request."""
        params = plain_params(self.kv_transfer_params)
        options = cast("RequestOptions", lookup.copy())
        options["prompt_tokens"], options["kv_transfer_params"] = self.prompt_tokens, params
        if self.settings.retain_for_s is not None:
            options["retain_for"] = self.settings.retain_for_s
        if self.settings.conversation_id is not None:
            options["conversation_id"] = self.settings.conversation_id
        if self.priority:
            options["priority"] = max(-_MAX_PRIORITY, min(_MAX_PRIORITY, self.priority))
        return options


@dataclass
class VllmRequest:
    """One request; implements `EngineRequest` and `HandoffRequest`."""

    request: Any
    registration: RequestRegistration
    geometry: CacheGeometry
    may_load: bool
    may_save: bool
    may_pull: bool = False
    may_hold: bool = False
    # Appended to each block hash: identity of the request's LoRA adapter, see `LoraAdapters`.
    tag: bytes = b""
    # Whether another engine pulls the request's blocks while this engine computes it.
    holds_early: bool = False
    # Whether the request's LoRA adapter was replaced, so that its KV must not be saved or held.
    stale: bool = False

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    @property
    def server_name(self) -> str:
        return self.registration.request_id

    @property
    def total_tokens(self) -> int:
        return int(self.request.num_tokens)

    @property
    def request_level(self) -> bool:
        """Whether a tier asks for every block, including loaded blocks (B1.1, B1.6).

        Also true if another engine pulls them at once, because lazy mode would store them too late.
        """
        return self.holds_early or self.registration.policy is OffloadPolicy.REQUEST_LEVEL

    @property
    def hold_name(self) -> str:
        return self.registration.settings.hold_as or self.server_name

    @property
    def prompt_tokens(self) -> int:
        return int(self.request.num_prompt_tokens)

    @property
    def kv_transfer_params(self) -> object:
        return self.request.kv_transfer_params

    def final_blocks(self, group: CacheGroup) -> int:
        """Counts the hashes, because vLLM hashes a block when its last token is final."""
        return len(self.hashes(group))

    def key(self, group: CacheGroup, position: int) -> bytes:
        return make_key(self.hashes(group)[position] + self.tag, group.index)

    def content(self, group: CacheGroup, position: int) -> BlockContent | None:
        """Returns the tokens of a block; None if its KV also depends on other inputs."""
        request = self.request
        if request.mm_features or request.cache_salt or request.prompt_embeds is not None:
            return None
        start = position * group.block_tokens
        return BlockContent(
            self.key(group, position - 1) if position else None,
            pack_tokens(request.all_token_ids[start : start + group.block_tokens]),
            request.lora_request.name if request.lora_request is not None else "",
        )

    def hold_key(
        self, engine_id: str, request_id: str, group: CacheGroup, position: int, num_tokens: int
    ) -> bytes | None:
        """Returns the key of a partial block; None if its tokens or the previous hash are missing.

        The key covers what vLLM hashes for a full block: previous hash, tokens and extra keys.
        """
        start, hashes = position * group.block_tokens, self.hashes(group)
        tokens = self.request.all_token_ids[start:num_tokens]
        if start + len(tokens) < num_tokens or position > len(hashes):
            return None
        before = hashes[position - 1] if position else b""
        extra, _ = generate_block_hash_extra_keys(self.request, start, num_tokens, 0)
        return make_hold_key(
            engine_id, request_id, group.index, position, before + self.tag + repr((list(tokens), extra)).encode()
        )

    def hashes(self, group: CacheGroup) -> Sequence[bytes]:
        hashes: Sequence[bytes] = resolve_block_hashes(
            self.request.block_hashes, self.geometry.hash_tokens, group.block_tokens
        )
        return hashes


def server_name(request_id: str) -> str:
    """Returns the request's name at the server: its id; the end of a long id becomes a hash."""
    if len(request_id) <= _MAX_ID_CHARACTERS:
        return request_id
    digest = hashlib.sha256(request_id.encode(errors="surrogatepass")).hexdigest()
    return f"{request_id[: _MAX_ID_CHARACTERS - len(digest) - 1]}-{digest}"


def plain_params(params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns the parameters that are not too long; None if they are not JSON or too many."""
    if params is None:
        return None
    try:
        short = {name: value for name, value in params.items() if len(json.dumps(value)) <= _MAX_PARAM_CHARACTERS}
        text = json.dumps(short, allow_nan=False)
    except (TypeError, ValueError, RecursionError, AttributeError):
        return None
    return short if len(text) <= _MAX_PARAMS_CHARACTERS else None
