"""Table of known blocks: what it keeps when blocks are removed."""

from __future__ import annotations

from kvtier.client.events.known_blocks import KnownBlocks

KEYS = [b"%d" % number for number in range(5000)]


def test_a_group_without_blocks_takes_no_memory() -> None:
    """Clients can make any number of namespaces, and each of them is a group."""
    known = KnownBlocks[str]()
    for number in range(100):
        group = f"{number}"
        assert known.store(group, 1, [KEYS[0], KEYS[0]]) == KEYS[:1]
        assert known.store(group, 2, KEYS[:2]) == KEYS[1:2]
        assert known.remove(group, 1, KEYS) == []
        assert known.remove(group, 3, KEYS) == []
        assert [list(keys) for keys in known.clear(group, 2)] == [KEYS[1::-1]]
        assert list(known.clear(group, 2)) == []
    assert not known._held
    known.store("a", 1, KEYS)
    assert list(known.begin_replay()) == []
    known.store("a", 1, KEYS[:2])
    assert sum(len(keys) for _, keys in known.end_replay()) == len(KEYS) - 2
    assert not known._unconfirmed
    known.store("b", 1, KEYS)
    assert {key for _, keys in known.lose() for key in keys} == set(KEYS)
    assert not known._held
    assert not list(known.all("b"))
    assert not known._held
