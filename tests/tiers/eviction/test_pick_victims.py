import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.eviction.quotas import Quotas, RetentionBudget, Tenant, TenantShare, pick_victims
from kvtier.tiers.secondary_tier import NamespaceId


def share(used: int, quota: int = 0) -> TenantShare:
    """Returns a share that uses this many bytes."""
    made = TenantShare("tenant", quota, None, RetentionBudget(0))
    made.used = used
    return made


def lengths(taker: TenantShare, wanted: int, *shares: TenantShare, size: int = 1) -> list[int]:
    """Returns the number of equal-sized items that each share must give."""
    lines = [(each, iter([number] * (each.used // size))) for number, each in enumerate(shares)]
    chosen = pick_victims(taker, wanted, lines, lambda _: size)
    return [chosen.count(number) for number in range(len(shares))]


def test_the_furthest_above_its_quota_pays_first() -> None:
    """Until the next share exceeds its quota by the same amount; then both pay."""
    taker, rich, poor = share(0), share(60, quota=10), share(50, quota=40)
    assert lengths(taker, 20, rich, poor) == [20, 0]
    assert lengths(taker, 60, taker, rich, poor) == [0, 50, 10]


def test_a_share_above_its_quota_pays_itself() -> None:
    """The wanted bytes count as its own, so a flood costs the tenant that causes it."""
    flood, other = share(90), share(30, quota=20)
    assert lengths(flood, 40, flood, other) == [40, 0]


def test_shares_above_their_quota_converge() -> None:
    """The share with the smaller excess gains until both are equal."""
    late, early = share(50), share(80)
    assert lengths(late, 30, late, early) == [15, 15]
    assert lengths(late, 60, late, early) == [45, 15], "both end with 65"


def test_no_share_falls_below_its_quota_for_another() -> None:
    """Not by a part of a block either: then the requester pays itself, or gets nothing."""
    taker, other = share(8), share(25, quota=20)
    assert lengths(taker, 8, other, size=4) == [1]
    assert lengths(taker, 16, taker, other, size=4) == [2, 1]


@given(st.data())
def test_quotas_hold_for_all_shares(data: st.DataObject) -> None:
    """For any shares, sizes and requests, others keep their quota, and no more goes than needed."""
    drawn = data.draw(st.lists(st.tuples(st.integers(0, 50), st.lists(st.integers(1, 9), max_size=8)), max_size=5))
    shares = [share(sum(sizes), quota) for quota, sizes in [(0, []), *drawn]]
    sizes = [[], *(sizes for _, sizes in drawn)]
    taker = shares[data.draw(st.integers(0, len(shares) - 1))]
    wanted = data.draw(st.integers(1, 60))
    lines = [(each, iter([(number, size) for size in sizes[number]])) for number, each in enumerate(shares)]
    chosen = pick_victims(taker, wanted, lines, lambda item: item[1])
    for number, each in enumerate(shares):
        left = each.used - sum(size for owner, size in chosen if owner == number)
        assert each is taker or left == each.used or left >= each.quota
    assert sum(size for _, size in chosen[:-1]) < wanted


def test_the_tag_of_a_namespace_gives_its_share() -> None:
    """A tenant without a share of its own uses the common one."""
    shares = Quotas("cpu", 100, [Tenant("a", b"a" * 16, {"cpu": 40}), Tenant("b", b"b" * 16, {"disk": 40})])
    names = [shares.of(NamespaceId(tag * 4 + bytes(16))).name for tag in (b"aaaa", b"bbbb", b"cccc")]
    assert names == ["a", "", ""], "b has nothing of this tier"
    assert [(each.name, each.quota, each.budget.bound) for each in shares] == [("", 0, 30), ("a", 40, 20)]


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ([Tenant("a", b"a" * 16, {"cpu": 60}), Tenant("b", b"b" * 16, {"cpu": 41})], "add up to 101 bytes"),
        ([Tenant("a", b"a" * 16, {"cpu": 60}, {"cpu": 59})], "limit of tenant a"),
        ([Tenant("a", b"a" * 16, {"cpu": 1}), Tenant("b", b"a" * 16, {"cpu": 1})], "same tag"),
    ],
)
def test_impossible_or_ambiguous_quotas_are_refused(tenants: list[Tenant], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quotas("cpu", 100, tenants)
