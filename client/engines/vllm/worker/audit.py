"""Audit: compares blocks that the engine has computed again with the same blocks in the server.

An audit finds stored KV that is wrong although its bytes are those that an engine stored: KV of
other weights, of other positions, or of other heads or layers. No checksum can find this.

Two computations of a block are seldom equal to the bit, because the kernels of most engines add in
another order if a batch has another size. So each layer is compared by its relative difference: the
norm of the difference of the two pages, divided by the norm of the computed page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ....offload import CacheGroup

__all__ = ["LIMITS", "AuditedLayer", "BlockAudit", "Difference"]

LIMITS = {torch.float32: 0.02, torch.float16: 0.1, torch.bfloat16: 0.1}
"""Largest accepted relative difference of a layer, by type of its elements."""

_LIMIT_OF_BYTES = 0.2
"""The same for elements of one byte."""


@dataclass(frozen=True)
class AuditedLayer:
    """The bytes of one tensor of a layer, in the order of the slot."""

    name: str
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Difference:
    """Result of the comparison of a block.

    `outcome`: `equal` (every byte), `close` (within the limits), `different`, or `unknown` if the
    bytes of a layer differ and are no numbers. `layer`: the layer with the largest difference.
    `relative`: its relative difference. `limit`: the largest accepted one.
    """

    outcome: str
    layer: str = ""
    relative: float = 0.0
    limit: float = 0.0


class BlockAudit:
    """Compares parts of blocks. `pieces`: number of parts of a block that the worker holds."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        num_blocks: int,
        pieces: int = 1,
    ) -> None:
        self._layers = {
            group.index: [
                AuditedLayer(name, tensor.numel() * tensor.element_size() // num_blocks // pieces, tensor.dtype)
                for name in group.layers
                for tensor in _tensors(kv_caches.get(name))
            ]
            for group in groups
        }

    def nbytes(self, group: int) -> int:
        """Returns the bytes of a part of a block of this group."""
        return sum(layer.nbytes for layer in self._layers[group])

    def compare(self, group: int, computed: memoryview, stored: memoryview) -> Difference:
        """Compares the bytes of a part that the engine has computed with those in the server."""
        worst, is_unknown, start = Difference("equal"), False, 0
        for layer in self._layers[group]:
            pages = [each[start : start + layer.nbytes] for each in (computed, stored)]
            start += layer.nbytes
            if pages[0] == pages[1]:
                continue
            limit = LIMITS.get(layer.dtype, _LIMIT_OF_BYTES)
            numbers = [_numbers(page, layer.dtype) for page in pages]
            if numbers[0] is None or numbers[1] is None:
                is_unknown = True
                continue
            relative = relative_difference(numbers[0], numbers[1])
            found = Difference("close" if relative <= limit else "different", layer.name, relative, limit)
            worst = max(worst, found, key=lambda each: each.relative)
        return Difference("unknown") if is_unknown and worst.outcome != "different" else worst


def relative_difference(computed: NDArray[np.float32], stored: NDArray[np.float32]) -> float:
    """Returns the norm of the difference, divided by that of `computed`; infinity, not NaN."""
    with np.errstate(all="ignore"):
        norm = float(np.linalg.norm(computed.astype(np.float64)))
        difference = float(np.linalg.norm(computed.astype(np.float64) - stored.astype(np.float64)))
    found = difference / norm if norm else float("inf")
    return found if np.isfinite(found) else float("inf")


def _tensors(cache: torch.Tensor | Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else cache or []


def _numbers(page: memoryview, dtype: torch.dtype) -> NDArray[np.float32] | None:
    """Returns the values of a page; None if elements of this type are no numbers."""
    if dtype is torch.bfloat16:
        return (np.frombuffer(page, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype in (torch.float16, torch.float32):
        kind = np.float16 if dtype is torch.float16 else np.float32
        return np.frombuffer(page, kind).astype(np.float32)
    if dtype.is_floating_point and dtype.itemsize == 1:
        table: NDArray[np.float32] = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
        return np.take(table, np.frombuffer(page, np.uint8))
    return None
