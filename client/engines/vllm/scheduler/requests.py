"""vLLM's requests and blocks, as the core of offloading asks for them."""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .... import OffloadPolicy, make_hold_key, make_key
from ....offload import CacheGeometry, CacheGroup, FreeBlock
from ..compat import generate_block_hash_extra_keys, get_block_hash, get_group_id, resolve_block_hashes
from ..request_settings import RequestSettings

__all__ = ["RequestRegistration", "VllmBlockPool", "VllmRequest", "plain_params", "server_name"]


@dataclass
class VllmRequest:
    """One request (an ``EngineRequest`` and a ``HandoffRequest``)."""

    request: Any
    announcement: RequestRegistration
    geometry: CacheGeometry
    may_load: bool
    may_save: bool
    may_pull: bool = False
    may_hold: bool = False

    @property
    def request_id(self) -> str:
        """See EngineRequest."""
        return str(self.request.request_id)

    @property
    def server_name(self) -> str:
        """See EngineRequest."""
        return self.announcement.request_id

    @property
    def total_tokens(self) -> int:
        """See EngineRequest."""
        return int(self.request.num_tokens)

    @property
    def request_level(self) -> bool:
        """See EngineRequest."""
        return self.announcement.wants_all

    @property
    def hold_name(self) -> str:
        """See HandoffRequest."""
        return self.announcement.settings.hold_as or self.server_name

    @property
    def prompt_tokens(self) -> int:
        """See HandoffRequest."""
        return int(self.request.num_prompt_tokens)

    @property
    def kv_transfer_params(self) -> object:
        """See HandoffRequest."""
        return self.request.kv_transfer_params

    def final_blocks(self, group: CacheGroup) -> int:
        """See EngineRequest; vLLM hashes a block when its last token is final."""
        return len(self.hashes(group))

    def key(self, group: CacheGroup, position: int) -> bytes:
        """See EngineRequest."""
        return make_key(self.hashes(group)[position], group.index)

    def hold_key(
        self, engine_id: str, request_id: str, group: CacheGroup, position: int, num_tokens: int
    ) -> bytes | None:
        """See HandoffRequest. Made of what vLLM hashes of a full block: the one before, the tokens, and what they stand for."""
        start, hashes = position * group.block_tokens, self.hashes(group)
        tokens = self.request.all_token_ids[start:num_tokens]
        if start + len(tokens) < num_tokens or position > len(hashes):
            return None
        before = hashes[position - 1] if position else b""
        extra, _ = generate_block_hash_extra_keys(self.request, start, num_tokens, 0)
        return make_hold_key(
            engine_id, request_id, group.index, position, before + repr((list(tokens), extra)).encode()
        )

    def hashes(self, group: CacheGroup) -> Sequence[bytes]:
        """Those of the request's blocks of a group; nothing is computed for it."""
        hashes: Sequence[bytes] = resolve_block_hashes(
            self.request.block_hashes, self.geometry.hash_tokens, group.block_tokens
        )
        return hashes


class VllmBlockPool:
    """The engine's block pool (a ``BlockPool``): empty until it is bound, so that nothing can be saved."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self._geometry = geometry
        self._pool: Any = None

    def bind(self, pool: Any) -> None:
        """Take note of the engine's block pool, once."""
        self._pool = pool

    def cached_tokens(self, request: VllmRequest) -> int:
        """A guess of how much of the prefix the engine has itself: not worth a promotion from disk."""
        group = self._geometry.leading_group
        hashes, count = request.hashes(group), 0
        if self._pool is not None:
            while count < len(hashes) and self._pool.get_cached_block(hashes[count], [group.index]):
                count += 1
        return count * group.block_tokens // self._geometry.step_tokens * self._geometry.step_tokens

    @property
    def num_blocks(self) -> int:
        """See BlockPool."""
        return int(self._pool.num_gpu_blocks) if self._pool is not None else 0

    def hold(self, block_ids: Sequence[int]) -> None:
        """See BlockPool."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        """See BlockPool."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])

    def put_back(self, block_ids: Sequence[int], behind: Collection[int]) -> None:
        """See BlockPool; vLLM itself puts first only blocks that hold nothing, and these stay the first."""
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
        """See BlockPool."""
        return int(self._pool.blocks[block_id].ref_cnt)

    def cached_key(self, block_id: int) -> bytes | None:
        """See BlockPool; vLLM names a block in the step that completes it."""
        return self._name(self._pool.blocks[block_id]).key

    def free_block(self, block_id: int) -> FreeBlock | None:
        """See BlockPool."""
        return None if self.references(block_id) else self._name(self._pool.blocks[block_id])

    def free_blocks(self) -> Iterator[FreeBlock]:
        """See BlockPool."""
        if self._pool is not None:
            for block in self._pool.free_block_queue.iter_blocks_after(None):
                yield self._name(block)

    def _name(self, block: Any) -> FreeBlock:
        block_hash, tokens = block.block_hash, block.block_hash_num_tokens
        if block_hash is None or tokens is None:
            return FreeBlock(block.block_id, 0, None)
        group = self._geometry.groups[get_group_id(block_hash)]
        # A hash may also be that of a block's beginning.
        key = make_key(get_block_hash(block_hash), group.index) if tokens % group.block_tokens == 0 else None
        return FreeBlock(block.block_id, group.index, key)


# Less than what the server takes, which is 512.
_MAX_ID_CHARACTERS = 256


# Users send them. What a tier votes by is a flag or two.
_MAX_PARAMS_CHARACTERS = 64 << 10


_MAX_PRIORITY = (1 << 31) - 1


@dataclass
class RequestRegistration:
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
