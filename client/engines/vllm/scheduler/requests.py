"""Adapters of vLLM's requests and block pool for `client/offload` and `client/handoff`."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from .....protos.wire.block_contents import BlockContent, pack_tokens
from .... import LeaseOptions, OffloadPolicy, RequestOptions, make_hold_key, make_key
from ....handoff import HandoffRequest
from ....offload import CacheGeometry, CacheGroup, FreeBlock
from ..compat import generate_block_hash_extra_keys, get_block_hash, get_group_id, resolve_block_hashes
from ..request_settings import RequestSettings

__all__ = ["RequestRegistration", "VllmBlockPool", "VllmRequest", "plain_params", "server_name"]

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


class VllmBlockPool:
    """vLLM's block pool: `BlockPool` and `PrefixCache`. Before `bind` no block is saved."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self._geometry = geometry
        self._pool: Any = None
        # By block hash of a request with a LoRA adapter: the adapter's tag; None: not to be saved.
        # Without its tag, such a block gets a key that no lookup names.
        self._tags: dict[bytes, bytes | None] = {}

    def bind(self, pool: Any) -> None:
        self._pool = pool

    def cached_tokens(self, request: VllmRequest) -> int:
        """Estimates how many leading tokens the engine still has in its own blocks."""
        group = self._geometry.leading_group
        hashes, count = request.hashes(group), 0
        if self._pool is not None:
            while count < len(hashes) and self._pool.get_cached_block(hashes[count], [group.index]):
                count += 1
        return count * group.block_tokens // self._geometry.step_tokens * self._geometry.step_tokens

    def cached_block(self, request: HandoffRequest, group: CacheGroup, position: int) -> int | None:
        assert isinstance(request, VllmRequest)
        pool, block_hash = self._pool, request.hashes(group)[position]
        cached = pool.get_cached_block(block_hash, [group.index]) if pool is not None else None
        return int(cached[0].block_id) if cached else None

    def learn_tag(self, request: VllmRequest, tag: bytes | None) -> None:
        """Records the tag of the blocks of a request with a LoRA adapter, for lazy mode.

        Called at the request's arrival and end. Hashes that the pool no longer has are forgotten.
        """
        groups = self._geometry.groups
        if len(self._tags) > 4 * max(self.num_blocks, 1024):
            cached = self._pool.get_cached_block if self._pool is not None else lambda *_: None
            self._tags = {
                block_hash: known
                for block_hash, known in self._tags.items()
                if any(cached(block_hash, [group.index]) for group in groups)
            }
        for group in groups:
            self._tags.update(dict.fromkeys(request.hashes(group), tag))

    @property
    def unused(self) -> bool:
        """Whether no request and no save uses a block. vLLM's null block is always in use."""
        return self._pool is None or self._pool.get_num_free_blocks() == self._pool.num_gpu_blocks - 1

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks) if self._pool is not None else 0

    def hold(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])

    def put_back(self, block_ids: Sequence[int], behind: Collection[int]) -> None:
        """Removes one reference from each block, and moves freed blocks with content in the queue.

        They move near the front: behind the blocks there without content or in `behind`.
        """
        queue, blocks = self._pool.free_block_queue, [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.free_blocks(blocks)
        stay = itertools.takewhile(
            lambda block: block.block_hash is None or block.block_id in behind, queue.iter_blocks_after(None)
        )
        first = list(stay) + [block for block in blocks if not block.ref_cnt and block.block_hash is not None]
        for block in first:
            queue.remove(block)
        queue.prepend_n(first)

    def references(self, block_id: int) -> int:
        return int(self._pool.blocks[block_id].ref_cnt)

    def cached_key(self, block_id: int) -> bytes | None:
        """Returns the block's key; None before the step that fills the block."""
        return self._name(self._pool.blocks[block_id]).key

    def free_block(self, block_id: int) -> FreeBlock | None:
        return None if self.references(block_id) else self._name(self._pool.blocks[block_id])

    def free_blocks(self) -> Iterator[FreeBlock]:
        if self._pool is not None:
            for block in self._pool.free_block_queue.iter_blocks_after(None):
                yield self._name(block)

    def _name(self, block: Any) -> FreeBlock:
        block_hash, tokens = block.block_hash, block.block_hash_num_tokens
        if block_hash is None or tokens is None:
            return FreeBlock(block.block_id, 0, None)
        group = self._geometry.groups[get_group_id(block_hash)]
        # A hash may cover only the first tokens of a block. Such a block has no key.
        content = get_block_hash(block_hash)
        tag = self._tags.get(content, b"")
        key = make_key(content + tag, group.index) if tokens % group.block_tokens == 0 and tag is not None else None
        return FreeBlock(block.block_id, group.index, key)


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
