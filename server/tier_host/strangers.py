"""What the guard does with objects that somebody else's class made, or gets: none of their own code gets in its way."""

from __future__ import annotations

from collections.abc import Sequence

from ...tiers.base import BlockBytes

__all__ = ["CANARY_BYTES", "is_left", "lend", "plant", "said", "shown"]

CANARY_BYTES = 8


def said(error: BaseException) -> str:
    """Returns what an error says, or only its kind where it cannot say it."""
    try:
        return f"{type(error).__name__}: {error!s:.200}"
    except BaseException:  # noqa: BLE001 - `__str__` may raise anything
        return type(error).__name__


def shown(thing: object) -> str:
    """Returns what a thing looks like, shortened; likewise."""
    try:
        return f"{thing!r:.100}"
    except BaseException:  # noqa: BLE001
        return f"a {type(thing).__name__}"


def lend(blocks: Sequence[BlockBytes]) -> list[BlockBytes]:
    """Returns the blocks with views of their own, which a tier may release (`with part as view:`) without harm to others."""
    return [BlockBytes(block.namespace, block.key, tuple(part[:] for part in block.parts)) for block in blocks]


def plant(part: memoryview, canary: bytes) -> None:
    """Marks a part where a load that stops half-way, or does nothing, would leave the mark. Tiny parts are let be."""
    for at in _places(part):
        part[at : at + CANARY_BYTES] = canary


def is_left(part: memoryview, canary: bytes) -> bool:
    """Returns whether a mark is still there."""
    return any(part[at : at + CANARY_BYTES] == canary for at in _places(part))


def _places(part: memoryview) -> tuple[int, ...]:
    tiny = part.nbytes < 3 * CANARY_BYTES
    return () if tiny else (0, part.nbytes // 2, part.nbytes - CANARY_BYTES)
