"""Small engine around the hand-off core: real clients, and KV that depends on its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peers import BLOCK, FULL, US, Cache, Request

from kvtier.client import (
    Client,
    Group,
    HoldGone,
    HoldName,
    KVTierError,
    Namespace,
    make_hold_key,
    make_key,
)
from kvtier.client.handoff import (
    ClaimedBlocks,
    ClaimId,
    FinishReason,
    HandoffCore,
    HandoffOptions,
    HandoffRequest,
    HeldBlock,
    NotClaimedReason,
    PlannedPublication,
    RemoteRequest,
)
from kvtier.client.offload import CacheGeometry, CacheGroup

TOKEN_BYTES = 8
NAMESPACE = Namespace("toy", "uint8", (Group(BLOCK * TOKEN_BYTES, BLOCK),))
WINDOWED = Namespace("windowed toy", "uint8", (Group(BLOCK * TOKEN_BYTES, BLOCK),) * 2)
WALL = 1e9


def digest(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(repr(list(tokens)).encode()).digest()


def kv_of(tokens: Sequence[int], end: int, group_index: int = 0) -> bytes:
    """Returns the KV of the first tokens in one group; each token's depends on all before."""
    seen, kv = hashlib.sha256(bytes([group_index])), bytearray()
    for token in tokens[:end]:
        seen.update(token.to_bytes(4, "big"))
        kv += seen.digest()[:TOKEN_BYTES]
    return bytes(kv)


class ToyRequest(Request):
    """A request with kvtier's keys."""

    def key(self, group: CacheGroup, position: int) -> bytes:
        return make_key(digest(self.tokens[: (position + 1) * BLOCK]), group.index)

    def hold_key(
        self, engine_id: str, request_id: str, group: CacheGroup, position: int, num_tokens: int
    ) -> bytes | None:
        if num_tokens > len(self.tokens):
            return None
        return make_hold_key(engine_id, request_id, group.index, position, digest(self.tokens[:num_tokens]))


@dataclass
class Turn:
    """Result of one request: number of computed tokens, and parameters for the next engine."""

    computed: int
    pulled: int
    params: dict[str, Any] | None
    tokens: list[int]


@dataclass
class ToyServer:
    """A `HandoffServer` that runs every call at once; a failure is a miss."""

    client: Client
    answers: list[tuple[ClaimId, ClaimedBlocks | None]] = field(default_factory=list)
    leases: dict[ClaimId, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def not_claimed(self, request: HandoffRequest, remote: RemoteRequest, reason: NotClaimedReason) -> None:
        hold = HoldName(remote.engine_id, remote.request_id)
        self._quietly(self.client.report_not_claimed, hold, request_id=request.request_id, reason=reason)

    def start_claim(
        self,
        claim: ClaimId,
        request: HandoffRequest,
        remote: RemoteRequest,
        first_positions: Sequence[int],
        min_blocks: int,
    ) -> bool:
        try:
            found = self.client.claim(
                HoldName(remote.engine_id, remote.request_id),
                first_positions=first_positions,
                wait=0.1,
                min_blocks=min_blocks,
            )
        except KVTierError as error:
            if not isinstance(error, HoldGone):
                self.log.append(f"claim: {error}")
            self.answers.append((claim, None))
            return True
        if found.id:
            self.leases[claim] = found.id
        blocks = [
            HeldBlock(int.from_bytes(key[-4:], "big"), position, key, item if status == 1 else None)
            for item, (key, position, status) in enumerate(
                zip(found.keys, found.hold.positions, found.statuses, strict=True)
            )
        ]
        self.answers.append((claim, ClaimedBlocks(found.id, found.hold.num_tokens, blocks)))
        return True

    def drop_claim(self, claim: ClaimId) -> None:
        if claim in self.leases:
            self._quietly(self.client.release, self.leases.pop(claim))

    def renew(self, remotes: Sequence[RemoteRequest]) -> None:
        self._quietly(self.client.renew_holds, *[HoldName(remote.engine_id, remote.request_id) for remote in remotes])

    def release(self, remote: RemoteRequest) -> None:
        self._quietly(self.client.release_holds, HoldName(remote.engine_id, remote.request_id))

    def publish(self, publication: PlannedPublication) -> None:
        self._quietly(
            self.client.publish,
            publication.request_id,
            publication.keys,
            publication.positions,
            num_tokens=publication.num_tokens,
            direction=publication.direction,
            hold_for=publication.hold_for,
        )

    def debug(self, text: str) -> None:
        self.log.append(text)

    def warn(self, text: str) -> None:
        self.log.append(text)

    def _quietly(self, call: Any, *arguments: Any, **named: Any) -> None:
        try:
            call(*arguments, **named)
        except KVTierError as error:
            self.log.append(f"{error}")


class ToyEngine:
    """Computes requests one by one, without a cache; of windows it keeps the blocks in reach."""

    def __init__(self, client: Client, geometry: CacheGeometry = FULL, **options: Any) -> None:
        self.client = client
        self.geometry = geometry
        self.server = ToyServer(client)
        identity = US._replace(engine_id=client.engine_id)
        self.core = HandoffCore(
            geometry, identity, HandoffOptions(bidirectional_kv_xfer=True, **options), self.server, Cache()
        )
        self.count = 0
        self.steps = 0.0

    def run(
        self,
        prompt: Sequence[int],
        params: Any,
        new_tokens: int,
        *,
        reason: FinishReason = FinishReason.STOPPED,
        saves: bool = True,
        scheduled: bool = True,
    ) -> Turn:
        """Runs one request, and checks that pulled KV equals what it would have computed."""
        self.count += 1
        self.steps += 1
        request = ToyRequest(params, list(prompt), request_id=f"{self.count}")
        self.core.arrived(request)
        self.core.heartbeat(self.steps)
        offered = self._match(request.request_id)
        if not scheduled:
            self.core.finished(request.request_id, self._tables(0, 0), 0, FinishReason.OTHER, WALL)
            return Turn(0, 0, None, list(prompt))
        end = len(prompt) + new_tokens
        tables = self._tables(end, offered)
        memory = {block_id: bytearray(BLOCK * TOKEN_BYTES) for table in tables for block_id in table}
        self.core.allocated(request.request_id, tables, offered)
        pulled = offered if self._pull(memory) else 0
        self.core.pull_ended(request.request_id)
        if not pulled:
            tables = self._tables(end, 0)
            memory = {block_id: bytearray(BLOCK * TOKEN_BYTES) for table in tables for block_id in table}
        self.core.allocated(request.request_id, tables, 0)
        # As in engines, the last token of a prompt that was pulled whole is computed again.
        self._compute(request, tables, memory, min(pulled, len(prompt) - 1), new_tokens)
        confirmed = len(request.tokens) - 1 if new_tokens else len(prompt)
        finished = self.core.finished(request.request_id, tables, confirmed, reason, WALL)
        if saves:
            blocks = [
                *((request.key(group, n), tables[group.index][n]) for group, n in self._full_blocks(tables, confirmed)),
                *((block.key or b"", block.block_id) for block in finished.blocks),
            ]
            self.server._quietly(self.client.store, [key for key, _ in blocks], [memory[block] for _, block in blocks])
        return Turn(confirmed - pulled, pulled, finished.params, request.tokens)

    def _tables(self, tokens: int, pulled: int) -> list[list[int]]:
        """Returns blocks for ``tokens`` tokens; null blocks before a window's reach."""
        count = 1 + tokens // BLOCK
        return [
            [
                1 + group.index * count + n if n >= group.first_needed_block(pulled) else self.geometry.null_block
                for n in range(count)
            ]
            for group in self.geometry.groups
        ]

    def _full_blocks(self, tables: list[list[int]], confirmed: int) -> list[tuple[CacheGroup, int]]:
        null = self.geometry.null_block
        places = [(group, n) for group in self.geometry.groups for n in range(confirmed // BLOCK)]
        return [(group, n) for group, n in places if tables[group.index][n] != null]

    def _match(self, request_id: str) -> int:
        while (offered := self.core.match(request_id, 0, self.steps, WALL)) is None:
            for claim, claimed in self.server.answers:
                self.core.claim_ended(claim, claimed, self.steps)
            self.server.answers.clear()
        return offered

    def _pull(self, memory: dict[int, bytearray]) -> bool:
        for pull in self.core.take_pulls():
            if not pull.job.reads:
                return False
            (read,) = pull.job.reads
            try:
                with self.client.read(read.lease_id, read.indices) as batch:
                    for block_id, view in zip(read.block_ids, batch.views(), strict=True):
                        memory[block_id][:] = view
            except KVTierError:
                return False
        return True

    def _compute(
        self, request: ToyRequest, tables: list[list[int]], memory: dict[int, bytearray], start: int, new_tokens: int
    ) -> None:
        for group in self.geometry.groups:
            first = group.first_needed_block(start)
            held = b"".join(memory[block_id] for block_id in tables[group.index][first:])
            known = kv_of(request.tokens, start, group.index)[first * BLOCK * TOKEN_BYTES :]
            assert held[: len(known)] == known, "tokens would be computed from wrong KV"
        for _ in range(new_tokens):
            request.tokens.append(digest(request.tokens)[0])
        for group in self.geometry.groups:
            data = kv_of(request.tokens, len(request.tokens), group.index)
            for number, block_id in enumerate(tables[group.index]):
                piece = data[number * BLOCK * TOKEN_BYTES : (number + 1) * BLOCK * TOKEN_BYTES]
                memory[block_id][: len(piece)] = piece
