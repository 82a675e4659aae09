"""Host pools of HiCache: where the bytes of a page are.

A page is a fixed number of tokens in one pool. The pool's layout decides in how many pieces of
contiguous bytes a page is: two in `page_first_direct` (keys, values), two per layer in
`layer_first`. A block's part has the pieces one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..failures import Unsupported

__all__ = ["KV", "MAMBA", "HostPool"]

KV = "kv"
MAMBA = "mamba"

_FORMAT = (
    *("layout", "dtype", "page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim"),
    *("kv_cache_dim", "storage_format_tag", "temporal_dtype", "conv_dtype", "indexer_dtype"),
)
"""Attributes of host pools that change the meaning of a page's bytes, if a pool has them."""


@dataclass(frozen=True)
class HostPool:
    """A host pool. `pieces`: bytes of each piece of a page, in the order of a part."""

    name: str
    pool: Any
    pieces: tuple[int, ...]

    @classmethod
    def probe(cls, name: str, pool: Any) -> HostPool:
        """Asks the pool for its first page. Raises Unsupported if pages have no addresses."""
        try:
            found = pool.get_page_buffer_meta(torch.arange(pool.page_size))
        except (NotImplementedError, ValueError, AttributeError) as error:
            raise Unsupported(
                f"pages of the host pool {name} have no addresses ({error}); try --hicache-mem-layout page_first_direct"
            ) from error
        if not found or not found[1]:
            raise Unsupported(f"the host pool {name} has no bytes of its own")
        return cls(name, pool, tuple(map(int, found[1])))

    @property
    def part_bytes(self) -> int:
        return sum(self.pieces)

    def addresses(self, indices: torch.Tensor, pages: int) -> list[int]:
        """Returns the addresses of all pieces of all pages. `indices`: rows of the pages' tokens.

        Raises ValueError if the rows are not those of `pages` pages.
        """
        expected = pages * int(self.pool.page_size)
        if indices.numel() != expected:
            raise ValueError(f"{pages} pages of {self.name} have {expected} rows, not {indices.numel()}")
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        if tuple(sizes) != self.pieces * pages:
            raise ValueError(f"the pages of {self.name} have changed their size")
        found: Sequence[int] = addresses
        return list(found)

    def describe(self) -> dict[str, str]:
        """Returns the format of a page, for the namespace."""
        known = {name: str(getattr(self.pool, name)) for name in _FORMAT if getattr(self.pool, name, None) is not None}
        return known | {"name": self.name, "kind": type(self.pool).__name__, "pieces": str(list(self.pieces))}
