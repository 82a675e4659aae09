"""How blocks are named."""

from __future__ import annotations

from itertools import combinations

from kvtier.client import make_hold_key, make_key
from kvtier.server.config.schema import LimitConfig
from kvtier.tiers.types import HOLD_ONLY_KEY_PREFIX


def test_names_of_a_hold_are_all_different() -> None:
    """Whatever of it differs; and nothing runs together at the seams."""
    keys = [
        make_hold_key("e", "r", 0, 0),
        make_hold_key("er", "", 0, 0),
        make_hold_key("", "er", 0, 0),
        make_hold_key("e", "r", 1, 0),
        make_hold_key("e", "r", 0, 1),
        make_hold_key("e", "r", 0, 0, b"tokens"),
        make_hold_key("e", "r\0", 0, 0),
    ]
    assert all(one != other for one, other in combinations(keys, 2))
    assert keys[0] == make_hold_key("e", "r", 0, 0)


def test_a_server_knows_the_names_of_a_hold() -> None:
    """It sends such blocks to no tier, by how their keys begin; and takes keys of that length."""
    key = make_hold_key("e" * 500, "r" * 500, 3, 1 << 40)
    assert key.startswith(HOLD_ONLY_KEY_PREFIX)
    assert key.endswith(make_key(b"", 3))
    assert len(key) <= LimitConfig().max_key_bytes
    assert not make_key(bytes(32)).startswith(HOLD_ONLY_KEY_PREFIX)
