"""Shares of a budget that several tenants use, without a reservation for any of them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["affordable"]


def affordable(sizes: Iterable[int], *, free: int, own: int) -> int:
    """Returns how many of the leading items one tenant may take, which already has `own` bytes.

    With each item it has at most as much as is free afterwards: alone a half of the budget, so that
    another tenant always finds room. Its first item may take all that is free, because an item can
    be larger than a share.
    """
    count = 0
    for nbytes in sizes:
        free -= nbytes
        if free < 0 or (own and own + nbytes > free):
            break
        own += nbytes
        count += 1
    return count
