"""Keys of blocks and of holds."""

from __future__ import annotations

from itertools import combinations

from kvtier.client import make_hold_key, make_key
from kvtier.server.config.schema import LimitConfig
from kvtier.tiers.types import HOLD_ONLY_KEY_PREFIX


def test_keys_of_holds_are_unique() -> None:
    """Each part changes the key, and the boundaries between parts are unambiguous."""
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


def test_a_server_recognises_keys_of_holds() -> None:
    """By their prefix: it stores such blocks in no secondary tier."""
    key = make_hold_key("e" * 500, "r" * 500, 3, 1 << 40)
    assert key.startswith(HOLD_ONLY_KEY_PREFIX)
    assert key.endswith((3).to_bytes(4, "big"))
    assert len(key) <= LimitConfig().max_key_bytes
    assert not make_key(bytes(32)).startswith(HOLD_ONLY_KEY_PREFIX)
