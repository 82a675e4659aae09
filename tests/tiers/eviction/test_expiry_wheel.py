from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.eviction.queues import ExpiryWheel


def test_expired_items_are_taken_in_order() -> None:
    """The earliest first, items of one time in the order of insertion, up to the limit."""
    table = ExpiryWheel[str]()
    table.put(["c"], 5)
    table.put(["a", "b"], 3)
    assert table.take(2, 10) == []
    assert table.take(5, 2) == ["a", "b"]
    assert table.take(5, 2) == ["c"]
    assert len(table) == 0


def test_a_time_can_be_changed_or_discarded() -> None:
    """Each item has one time."""
    table = ExpiryWheel[str]()
    table.put(["a", "b", "c"], 3)
    table.put(["a"], 9)
    table.discard("b")
    table.discard("unknown")
    assert (table.take(3, 10), table.when("a")) == (["c"], 9)


def test_memory_does_not_grow_with_moves() -> None:
    """An item whose time changes often leaves no lasting entries."""
    table = ExpiryWheel[str](width=10)
    for now in range(10_000):
        table.put(["a"], now + 100)
        assert table.take(now, 10) == []
    assert len(table._slots) <= 12


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 50))), st.floats(0.1, 20))
def test_items_expire_at_most_one_width_late(moves: list[tuple[int, float]], width: float) -> None:
    """No item expires early."""
    table = ExpiryWheel[int](width)
    due: dict[int, float] = {}
    for item, when in moves:
        table.put([item], when)
        due[item] = when
    for now in range(80):
        for item in table.take(now, 100):
            assert due.pop(item) <= now + 1e-6
        assert all(when + width + 1 > now for when in due.values())
