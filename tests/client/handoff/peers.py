"""Fakes for the hand-off core: requests, a recording server, and a rig of one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvtier.client.handoff import (
    ClaimedBlocks,
    ClaimId,
    EngineIdentity,
    FinishedRequest,
    FinishReason,
    HandoffCore,
    HandoffOptions,
    HandoffRequest,
    HeldBlock,
    NotClaimedReason,
    PlannedPublication,
    RemoteRequest,
)
from kvtier.client.handoff.claims import TransferState
from kvtier.client.offload import BlockTables, CacheGeometry, CacheGroup

BLOCK = 16
FULL = CacheGeometry((CacheGroup(0, BLOCK, None),), step_tokens=BLOCK, hash_tokens=BLOCK)
WINDOW = CacheGeometry((CacheGroup(0, BLOCK, None), CacheGroup(1, BLOCK, 24)), step_tokens=BLOCK, hash_tokens=BLOCK)
STATE = CacheGeometry(
    (CacheGroup(0, BLOCK, None), CacheGroup(1, BLOCK, None, is_state=True)), step_tokens=BLOCK, hash_tokens=BLOCK
)
US = EngineIdentity("us", "10.0.0.1", 7000, 2)
PEER = RemoteRequest("peer", "theirs", "10.0.0.2", 7001)
WALL = 1e9

REMOTE: Mapping[str, Any] = MappingProxyType(
    {
        "remote_engine_id": PEER.engine_id,
        "remote_request_id": PEER.request_id,
        "remote_host": PEER.host,
        "remote_port": PEER.port,
    }
)


def prefilled(**more: Any) -> dict[str, Any]:
    """Returns the parameters for a decode engine after a prefill engine computed the prompt."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[0]], **REMOTE} | more


def answered(tokens: int, **more: Any) -> dict[str, Any]:
    """Returns the parameters for a prefill engine while a decode engine holds ``tokens`` tokens."""
    flags = {"do_remote_prefill": False, "do_remote_decode": True, "remote_num_tokens": tokens}
    return {**flags, "remote_block_ids": [list(range(-(-tokens // BLOCK)))], **REMOTE} | more


@dataclass
class Request:
    """A `HandoffRequest` of these tokens; keys are derived from them."""

    kv_transfer_params: Any
    tokens: list[int]
    prompt_tokens: int = 0
    request_id: str = "r"

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_tokens or len(self.tokens)

    may_pull: bool = True
    may_hold: bool = True

    @property
    def hold_name(self) -> str:
        return f"server's {self.request_id}"

    def final_blocks(self, group: CacheGroup) -> int:
        return len(self.tokens) // group.block_tokens

    def key(self, group: CacheGroup, position: int) -> bytes:
        return f"{group.index} {self.tokens[: (position + 1) * group.block_tokens]}".encode()

    def hold_key(
        self, engine_id: str, request_id: str, group: CacheGroup, position: int, num_tokens: int
    ) -> bytes | None:
        if num_tokens > len(self.tokens):
            return None
        return f"{engine_id} {request_id} {group.index} {position} {self.tokens[:num_tokens]}".encode()


@dataclass
class Cache:
    """A prefix cache. ``blocks[group.index, position]`` is the id of the block of the request."""

    blocks: dict[tuple[int, int], int] = field(default_factory=dict)

    def cached_block(self, request: HandoffRequest, group: CacheGroup, position: int) -> int | None:
        assert position < request.final_blocks(group), "the position has no content key"
        return self.blocks.get((group.index, position))


@dataclass
class Server:
    reachable: bool = True
    claims: list[tuple[ClaimId, RemoteRequest, list[int]]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    dropped: list[ClaimId] = field(default_factory=list)
    renewed: list[list[RemoteRequest]] = field(default_factory=list)
    released: list[RemoteRequest] = field(default_factory=list)
    published: list[PlannedPublication] = field(default_factory=list)
    debugged: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    not_claims: list[tuple[RemoteRequest, NotClaimedReason]] = field(default_factory=list)

    def not_claimed(self, request: HandoffRequest, remote: RemoteRequest, reason: NotClaimedReason) -> None:
        self.not_claims.append((remote, reason))

    def start_claim(
        self,
        claim: ClaimId,
        request: HandoffRequest,
        remote: RemoteRequest,
        first_positions: Sequence[int],
        min_blocks: int,
    ) -> bool:
        if self.reachable:
            self.claims.append((claim, remote, list(first_positions)))
            self.waits.append(min_blocks)
        return self.reachable

    def drop_claim(self, claim: ClaimId) -> None:
        self.dropped.append(claim)

    def renew(self, remotes: Sequence[RemoteRequest]) -> None:
        self.renewed.append(list(remotes))

    def release(self, remote: RemoteRequest) -> None:
        self.released.append(remote)

    def publish(self, publication: PlannedPublication) -> None:
        self.published.append(publication)

    def debug(self, text: str) -> None:
        self.debugged.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)


def held(
    geometry: CacheGeometry, tokens: list[int], num_tokens: int, *, missing: Sequence[tuple[int, int]] = ()
) -> ClaimedBlocks:
    """Returns the grant of a claim: all blocks that a reader needs, less some (group, position)."""
    theirs, blocks = Request(None, tokens), []
    for group in geometry.groups:
        for position in range(group.first_needed_block(num_tokens), -(-num_tokens // group.block_tokens)):
            is_full = (position + 1) * group.block_tokens <= num_tokens
            key = (
                theirs.key(group, position)
                if is_full
                else theirs.hold_key(PEER.engine_id, PEER.request_id, group, position, num_tokens)
            )
            item = None if (group.index, position) in missing else len(blocks)
            blocks.append(HeldBlock(group.index, position, key or b"", item))
    return ClaimedBlocks(77, num_tokens, blocks)


class Rig:
    """One engine's core, one request, and shortcuts."""

    def __init__(
        self,
        params: Any,
        prompt: int = 100,
        *,
        geometry: CacheGeometry = FULL,
        arrives: bool = True,
        **options: Any,
    ) -> None:
        self.server, self.cache = Server(), Cache()
        self.geometry = geometry
        self.core = HandoffCore(geometry, US, HandoffOptions(**options), self.server, self.cache)
        self.request = Request(params, list(range(prompt)))
        if arrives:
            self.core.arrived(self.request)

    @property
    def transfer(self) -> TransferState:
        return self.core._requests["r"].transfer

    def match(self, computed: int = 0, *, now: float = 0.0, wall: float = WALL) -> int | None:
        return self.core.match("r", computed, now, wall)

    def answer(self, claimed: ClaimedBlocks | None, now: float = 0.0) -> None:
        """The server answers the last claim."""
        self.core.claim_ended(self.server.claims[-1][0], claimed, now)

    def pulled(self, tokens: int, computed: int = 0, *, missing: Sequence[tuple[int, int]] = ()) -> int | None:
        """Matches, grants ``tokens`` tokens of the same prompt, and matches again."""
        assert self.match(computed) is None
        self.answer(held(self.geometry, list(range(max(tokens, 400))), tokens, missing=missing))
        return self.match(computed)

    def tables(self, blocks: int = 30) -> BlockTables:
        return [[100 * group.index + position + 1 for position in range(blocks)] for group in self.geometry.groups]

    def allocate(self, external: int = 0) -> None:
        self.core.allocated("r", self.tables(), external)

    def finish(
        self, tokens: int = 100, reason: FinishReason = FinishReason.LENGTH, tables: BlockTables | None = None
    ) -> FinishedRequest:
        return self.core.finished("r", tables if tables is not None else self.tables(), tokens, reason, WALL)
