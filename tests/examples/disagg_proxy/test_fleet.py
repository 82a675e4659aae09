"""Choice of the engine for the next request."""

from __future__ import annotations

from collections import Counter

from disagg_proxy.fleet import MAX_PAUSE_S, SLACK, Fleet, Instance, Role
from disagg_proxy.transfer import EngineIdentity


def _fleet(count: int = 3) -> Fleet:
    return Fleet([Instance(f"http://d{number}:8000", Role.DECODE) for number in range(count)])


def _chosen(fleet: Fleet, key: str | None = None) -> Instance:
    instance = fleet.choose(key)
    assert instance is not None
    return instance


def test_the_idlest_is_chosen() -> None:
    """Without a conversation: fewest requests in flight, then fewest requests served."""
    fleet = _fleet()
    for instance, outstanding in zip(fleet.instances, (2, 1, 3), strict=True):
        instance.outstanding = outstanding
    assert _chosen(fleet) is fleet.instances[1]
    for instance in fleet.instances:
        instance.outstanding = 0
    served = Counter[str]()
    for _ in range(9):
        instance = _chosen(fleet)
        instance.served += 1
        served[instance.url] += 1
    assert set(served.values()) == {3}


def test_a_conversation_stays_where_its_prefix_is() -> None:
    """The same engine for each turn, also after a restart; many conversations use all engines."""
    homes = {f"c{number}": _chosen(_fleet(), f"c{number}").url for number in range(100)}
    assert homes == {key: _chosen(_fleet(), key).url for key in homes}
    assert min(Counter(homes.values()).values()) > 15


def test_an_engine_more_moves_few_conversations() -> None:
    """Only those that belong to the new engine from now on."""
    keys = [f"c{number}" for number in range(100)]
    moved = {_chosen(_fleet(4), key).url for key in keys if _chosen(_fleet(4), key).url != _chosen(_fleet(3), key).url}
    assert moved == {"http://d3:8000"}


def test_a_busy_home_is_left() -> None:
    """A prefix cache is worth a short queue, not a long one."""
    fleet = _fleet()
    home = _chosen(fleet, "c")
    home.outstanding = SLACK - 1
    assert _chosen(fleet, "c") is home
    home.outstanding = SLACK
    assert _chosen(fleet, "c") is not home


def test_engines_that_are_down_or_were_tried_are_excluded() -> None:
    """None is returned when all were tried; `include_down` then adds engines that are down."""
    fleet = _fleet(2)
    first = _chosen(fleet, "c")
    second = fleet.choose("c", [first])
    assert second not in {first, None}
    assert fleet.choose("c", fleet.instances, include_down=True) is None
    first.failed(0.0)
    assert _chosen(fleet, "c") is second
    assert fleet.choose("c", [second]) is None  # type: ignore[list-item]
    assert fleet.choose("c", [second], include_down=True) is first  # type: ignore[list-item]


def test_failures_in_a_row_are_answered_with_patience() -> None:
    """1 s, 2, 4 and so on, at most 30; an answered request ends `is_suspect`, health does not."""
    instance = _fleet(1).instances[0]
    pauses = []
    for _ in range(8):
        instance.failed(100.0)
        pauses.append(instance.retry_at - 100.0)
        instance.is_healthy()
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]
    assert instance.is_up
    instance.answered()
    instance.failed(0.0)
    assert instance.retry_at == 1.0


def test_identity_is_unknown_after_a_failure() -> None:
    """After a failure the engine is probed again before its identity is used."""
    instance = _fleet(1).instances[0]
    instance.identified(EngineIdentity("d0", "h", 1, 1), 5.0)
    assert instance.engine_seen_at == 5.0
    instance.failed(6.0)
    assert (instance.engine, instance.engine_seen_at) == (None, None)
