"""Timing of the hand-off of a prefix. The server removes its blocks with their hold."""

from __future__ import annotations

import contextlib
import mmap
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from kvtier.client.errors import HoldGone, KVTierError
from kvtier.client.namespace import Namespace, make_hold_key
from kvtier.client.results import HoldName, PublishStatus, StoreStatus
from kvtier.client.sync import Client
from kvtier.cuda.host.copy import address_of, copy_batch

from .errors import BreakEvenError
from .geometry import CLIENT_NAME, Geometry, lengths_up_to

__all__ = ["TransferRig"]

_HOLD_SECONDS = 60.0
"""Time after which the server removes the blocks if this process is killed."""

_STORE_BYTES = 32 << 20
"""Maximum bytes per store call, so that a busy server is not blocked."""


@dataclass(frozen=True, slots=True)
class _Block:
    key: bytes
    position: int
    nbytes: int


class TransferRig:
    """Holds a prefix on a server and reads pieces of it. A context manager that removes the prefix.

    The keys are those of `make_hold_key`: the blocks stay in the CPU tier and end with their hold.
    """

    def __init__(self, client: Client, geometry: Geometry, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._client = client
        self._geometry = geometry
        self._clock = clock
        self._base = HoldName(client.engine_id, f"everything {uuid.uuid4().hex}")
        self._part = self._base
        """Hold of the current or last read."""
        self._steps: list[list[_Block]] = []
        self._states: list[_Block] = []
        self._buffer = mmap.mmap(-1, mmap.PAGESIZE)
        self._reads = 0
        self.lengths: list[int] = []
        """Lengths in tokens that can be read."""

    @staticmethod
    def namespace(geometry: Geometry) -> Namespace:
        """Returns the namespace of all break-even measurements with this geometry."""
        return Namespace(
            CLIENT_NAME,
            "uint8",
            geometry.groups,
            hash_scheme="none",
            attributes={"purpose": "break-even benchmark"},
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the server."""
        return sum(block.nbytes for block in self._blocks(0, len(self._steps)))

    def fill(self, max_tokens: int, max_bytes: int) -> None:
        """Publishes and stores the longest prefix that fits and that the server accepts.

        Raises:
            BreakEvenError: the prefix is too short for a measurement.
            KVTierError: the server does not respond.
        """
        tokens = min(max_tokens, self._fitting(max_bytes))
        while True:
            self.lengths = lengths_up_to(tokens, self._geometry.step_tokens)
            if len(self.lengths) < 2:
                least = 2 * self._geometry.step_tokens, 2 * self._geometry.step_bytes
                raise BreakEvenError(
                    f"two blocks ({least[0]:,} tokens, {least[1]:,} bytes) are the least to learn from, and more than "
                    "--max-tokens, --max-bytes, an eighth of the CPU tier, or the server's handoff.part allow"
                )
            self._lay_out(self.lengths[-1] // self._geometry.step_tokens)
            if self._publish(self._base, self._blocks(0, len(self._steps))):
                break
            tokens //= 2
        self._store()
        self._buffer = mmap.mmap(-1, max(self.nbytes, mmap.PAGESIZE))

    def read(self, tokens: int) -> float:
        """Reads a prefix through a hold; returns the seconds from the claim to the confirmed copy.

        Publication and release are not included, because engines do them in the background.

        Raises:
            BreakEvenError: the server has removed the blocks.
            KVTierError: the server does not respond.
        """
        count = tokens // self._geometry.step_tokens
        self._reads += 1
        # Another piece in each call, because a short piece would stay in the processor's caches.
        start = self._reads * count % (len(self._steps) - count + 1)
        blocks = self._blocks(start, count)
        self._part = HoldName(self._client.engine_id, f"{tokens} tokens {self._reads}")
        try:
            if self._client.renew_holds(self._base, extension=_HOLD_SECONDS) or not self._publish(self._part, blocks):
                raise BreakEvenError("the server has dropped what was to be measured: a reset, or holds of others")
            return self._claim_and_copy(self._part, blocks, start)
        finally:
            self._release(self._part)

    def copy(self) -> float:
        """Copies within this process, the limit of any transfer; returns seconds per byte."""
        half, (address, _) = len(self._buffer) // 2, address_of(self._buffer)
        began = self._clock()
        copy_batch([address], [address + half], [half])
        return (self._clock() - began) / half

    def _claim_and_copy(self, hold: HoldName, blocks: Sequence[_Block], start: int) -> float:
        targets = _addresses(address_of(self._buffer)[0] + start * self._geometry.step_bytes, blocks)
        began = self._clock()
        try:
            with self._client.claim(hold) as lease:
                if lease.prefix_hits < len(blocks):
                    raise BreakEvenError(f"only {lease.prefix_hits} of {len(blocks)} blocks are there any more")
                with self._client.read(lease, range(len(blocks))) as batch:
                    copy_batch(targets, [batch.address + offset for offset in batch.offsets], batch.sizes)
                return self._clock() - began
        except HoldGone as gone:
            raise BreakEvenError(f"a hold was lost before it was read: {gone}") from None

    def _fitting(self, max_bytes: int) -> int:
        """Returns the maximum number of tokens that fit into `max_bytes` and into one call."""
        geometry, states = self._geometry, self._geometry.states()
        steps = (max_bytes - sum(geometry.groups[index].part_bytes for index in states)) // geometry.step_bytes
        keys = sum(count for _, count in geometry.step_blocks())
        steps = min(steps, ((self._client.max_keys or 1) - len(states)) // keys)
        return max(0, steps) * geometry.step_tokens

    def _lay_out(self, steps: int) -> None:
        def block(group: int, position: int) -> _Block:
            key = make_hold_key(self._base.engine_id, self._base.request_id, group, position)
            return _Block(key, position, self._geometry.groups[group].part_bytes)

        self._states = [block(group, 0) for group in self._geometry.states()]
        self._steps = [
            [block(group, step * n + i) for group, n in self._geometry.step_blocks() for i in range(n)]
            for step in range(steps)
        ]

    def _blocks(self, start: int, count: int) -> list[_Block]:
        return [block for step in self._steps[start : start + count] for block in step] + self._states

    def _publish(self, hold: HoldName, blocks: Sequence[_Block]) -> bool:
        """Returns whether the server holds the blocks; False if they exceed its limit in bytes."""
        found = self._client.publish(
            hold.request_id,
            [block.key for block in blocks],
            [block.position for block in blocks],
            num_tokens=len(blocks),
            hold_for=_HOLD_SECONDS,
        )
        if found.status is PublishStatus.TOO_MANY:
            raise BreakEvenError("the server holds as many requests as it may (handoff.max_holds): try again later")
        return found.status is PublishStatus.PUBLISHED

    def _store(self) -> None:
        blocks = self._blocks(0, len(self._steps))
        bytes_of = {block.nbytes: bytes(block.nbytes) for block in blocks}
        at_once = max(1, _STORE_BYTES // max(bytes_of))
        for start in range(0, len(blocks), at_once):
            some = blocks[start : start + at_once]
            statuses = self._client.store([block.key for block in some], [bytes_of[block.nbytes] for block in some])
            if statuses.count(StoreStatus.GRANTED) < len(some):
                raise BreakEvenError(
                    "the CPU tier has no room: what is in it is pinned. Try again later, or with a smaller --max-bytes"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Release both holds, because Ctrl-C may have interrupted a publication or a release.
        self._release(self._base, self._part)

    def _release(self, *holds: HoldName) -> None:
        with contextlib.suppress(KVTierError):
            self._client.release_holds(*holds)


def _addresses(address: int, blocks: Sequence[_Block]) -> list[int]:
    found = []
    for block in blocks:
        found.append(address)
        address += block.nbytes
    return found
