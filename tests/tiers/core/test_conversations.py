"""Conversations: the keys of their requests, and actions on their blocks."""

from unittest import mock

import pytest
from harness.operations import Steps, run_to_end
from simulation import EXTENT, ModelTier
from tenants import PAGE, Rig, keys, spec, tenant

from kvtier.tiers.core import conversation_actions
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import ContinueWork
from kvtier.tiers.core.conversation_actions import ActionCounts, BlockAction, TierUse
from kvtier.tiers.core.conversations import Conversation, ConversationTable
from kvtier.tiers.core.operations import Operation
from kvtier.tiers.errors import RetentionFull
from kvtier.tiers.secondary_tier import RequestInfo

LIMITS = "kvtier.tiers.core.conversations.MAX_"


def begin(rig: Rig, name: str, request: str = "r", *, owner: str = "alice") -> Conversation:
    """Begins a request of a conversation, and ends an earlier one of this id."""
    session = rig.session(spec(owner))
    rig.core.finish_request(session, request)
    rig.core.begin_request(session, RequestInfo(request, session.namespace.id, conversation_id=name))
    conversation = rig.core._requests.conversation_of(session, request)
    assert conversation is not None
    return conversation


def store(rig: Rig, name: str, numbers: range, *, owner: str = "alice") -> Conversation:
    """Stores blocks in a request of a conversation."""
    conversation, session = begin(rig, name, owner=owner), rig.session(spec(owner))
    answer = run_to_end(
        rig.core.prepare_store(session, keys(numbers), StoreSpec(request_id="r", lease_seconds=1e9), now=0)
    )
    if answer.store_id is not None:
        run_to_end(rig.core.complete_store(session, answer.store_id))
    rig.work()
    return conversation


def work(rig: Rig, action: Operation[ActionCounts]) -> ActionCounts:
    steps = Steps(action)
    while steps.step():
        rig.work()
    rig.work()
    return steps.answer


def work_off(rig: Rig) -> None:
    while ContinueWork() in rig.core.take_commands():
        rig.core.work()


def retained(rig: Rig, conversation: Conversation) -> list[int]:
    """Returns the number of retained blocks in each tier."""
    return [tier.retained for tier in run_to_end(rig.core.use_of_conversation(conversation))]


def flood(rig: Rig) -> None:
    rig.store("alice", range(1000, 1640))


def disk_rig() -> Rig:
    return Rig(tiers=[ModelTier("disk", 4096 * PAGE)])


def test_it_has_the_keys_that_requests_look_up_and_store() -> None:
    """Those of the latest request are known apart, head first."""
    rig = Rig()
    conversation = store(rig, "c", range(8))
    begin(rig, "c")
    session = rig.session(spec("alice"))
    for prefix in (True, False):
        run_to_end(
            rig.core.lookup(
                session, keys([0, 1, 90]), LookupSpec(prefix=prefix, request_id="r", lease_seconds=1e9), now=0
            )
        )
    assert list(conversation.latest) == keys([0, 1, 90])
    assert list(conversation.keys) == keys([*range(8), 90])
    assert (conversation.requests, len(rig.core._conversations.table)) == (2, 1)


def test_a_request_without_a_conversation_records_nothing() -> None:
    rig = Rig()
    rig.store("alice", range(8))
    assert rig.look_up("alice", range(8)) == 8
    assert len(rig.core._conversations.table) == rig.core._conversations.table.keys == 0


def test_a_conversation_keeps_the_keys_of_its_latest_request() -> None:
    with mock.patch(f"{LIMITS}KEYS", 12):
        rig = Rig()
        store(rig, "c", range(8))
        conversation = store(rig, "c", range(4, 14))
        assert list(conversation.keys) == keys([*range(4, 14)])
        store(rig, "c", range(100, 120))
        assert list(conversation.keys) == keys(range(100, 112))


@pytest.mark.parametrize("limit", ["TENANT_KEYS", "ALL_KEYS", "TENANT_CONVERSATIONS", "ALL_CONVERSATIONS"])
def test_the_table_forgets_the_conversation_that_was_not_used_for_the_longest_time(limit: str) -> None:
    """A pinned one stays. The tiers keep the blocks of forgotten ones."""
    with mock.patch(f"{LIMITS}{limit}", 24 if limit.endswith("KEYS") else 3):
        rig = Rig()
        pinned = store(rig, "pinned", range(8))
        work(rig, rig.core.act_on_conversations(BlockAction.PIN, [pinned]))
        first, second = store(rig, "first", range(10, 18)), store(rig, "second", range(20, 28))
        store(rig, "first", range(10, 18))
        third = store(rig, "third", range(30, 38))
        table = rig.core._conversations.table
        assert set(table) == {pinned, first, third}
        assert (table.keys, table.forgotten, second.is_open) == (24, 1, False)
        assert set(keys(range(20, 28))) <= rig.visible("alice")


def test_the_largest_tenant_loses_its_oldest_conversation() -> None:
    with mock.patch(f"{LIMITS}ALL_CONVERSATIONS", 3):
        rig = Rig()
        bob = store(rig, "b", range(4), owner="bob")
        for number in range(3):
            store(rig, f"c{number}", range(4))
        assert {each.id for each in rig.core._conversations.table} == {"b", "c1", "c2"}
        assert bob.is_open


def test_retained_blocks_stay_until_their_time() -> None:
    """In both tiers, also the blocks that later requests store."""
    rig = Rig(tiers=[ModelTier("disk", 64 * PAGE)])
    conversation = store(rig, "c", range(8))
    assert work(rig, rig.core.act_on_conversations(BlockAction.RETAIN, [conversation], 60)) == ActionCounts(changed=8)
    store(rig, "c", range(8, 12))
    flood(rig)
    assert set(keys(range(12))) <= rig.visible("alice") & rig.below("alice")
    assert rig.share("alice").retained == 12 * PAGE
    rig.tick(61)
    assert rig.share("alice").retained == 0


def test_without_retention_a_flood_evicts_the_blocks() -> None:
    rig = Rig()
    store(rig, "c", range(8))
    flood(rig)
    assert not set(keys(range(8))) & rig.visible("alice")


def test_too_many_blocks_are_refused_and_nothing_changes() -> None:
    """A tenant may retain half of its quota."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    small, large = store(rig, "small", range(8)), store(rig, "large", range(10, 30))
    with pytest.raises(RetentionFull, match="may retain"):
        work(rig, rig.core.act_on_conversations(BlockAction.RETAIN, [large], 60))
    assert rig.share("alice").retained == 0
    assert large.retain_until == 0
    assert work(rig, rig.core.act_on_conversations(BlockAction.RETAIN, [small], 60)).changed == 8
    assert work(rig, rig.core.act_on_conversations(BlockAction.RETAIN, [small], 90)).changed == 8, (
        "retained blocks are charged once"
    )


def test_released_blocks_can_be_evicted() -> None:
    """Except those that another retained conversation uses."""
    rig = Rig()
    first, second = store(rig, "first", range(8)), store(rig, "second", range(4, 12))
    work(rig, rig.core.act_on_conversations(BlockAction.RETAIN, [first, second], 60))
    assert work(rig, rig.core.act_on_conversations(BlockAction.RELEASE, [first])) == ActionCounts(changed=4, shared=4)
    flood(rig)
    assert rig.visible("alice") & set(keys(range(12))) == set(keys(range(4, 12)))


def test_a_release_searches_no_conversations_of_another_tenant() -> None:
    """However many of them are retained, it takes as many slices."""
    rig, slices = Rig(), []
    for number in range(2):
        first, _ = store(rig, f"first {number}", range(64)), store(rig, f"second {number}", range(64))
        release = Steps(rig.core.act_on_conversations(BlockAction.RELEASE, [first]))
        with mock.patch.object(conversation_actions, "_SEARCHES", 64):
            slices.append(sum(1 for _ in iter(release.step, False)))
        theirs = [begin(rig, f"{each}", owner="bob") for each in range(64)]
        work(rig, rig.core.act_on_conversations(BlockAction.RETAIN, theirs, 60))
    assert slices[0] == slices[1]


def test_demoted_blocks_are_evicted_first() -> None:
    """If a tier below has them; retention ends. A later use makes them ordinary blocks again."""
    rig = disk_rig()
    conversation = store(rig, "c", range(8))
    work(rig, rig.core.act_on_conversations(BlockAction.RETAIN, [conversation], 60))
    rig.store("alice", range(100, 132))
    assert work(rig, rig.core.act_on_conversations(BlockAction.DEMOTE, [conversation])) == ActionCounts(changed=8)
    rig.look_up("alice", range(2))
    rig.store("alice", range(200, 230))
    assert rig.visible("alice") & set(keys(range(8))) == set(keys(range(2)))
    assert set(keys(range(100, 132))) <= rig.visible("alice")
    assert set(keys(range(8))) <= rig.below("alice")


def test_blocks_in_no_tier_below_are_not_demoted() -> None:
    rig = Rig()
    conversation = store(rig, "c", range(8))
    assert work(rig, rig.core.act_on_conversations(BlockAction.DEMOTE, [conversation])) == ActionCounts(kept=8)


def test_demoted_blocks_may_be_pinned() -> None:
    """A store finds room behind them."""
    rig = disk_rig()
    conversation = store(rig, "c", range(32))
    lease = run_to_end(
        rig.core.lookup(rig.session(spec("alice")), keys(range(32)), LookupSpec(lease_seconds=1e9), now=0)
    )
    work(rig, rig.core.act_on_conversations(BlockAction.DEMOTE, [conversation]))
    flood(rig)
    assert set(keys(range(1632, 1640))) <= rig.visible("alice")
    assert lease.lease is not None
    assert set(keys(range(32))) <= rig.visible("alice")


def test_deleted_blocks_are_gone_from_all_tiers() -> None:
    """Blocks of other conversations stay, and the conversation is forgotten."""
    rig = disk_rig()
    first, second = store(rig, "first", range(8)), store(rig, "second", range(4, 12))
    counts = work(rig, rig.core.act_on_conversations(BlockAction.DELETE, [first]))
    assert counts == ActionCounts(changed=4, shared=4)
    assert rig.visible("alice") == rig.below("alice") == set(keys(range(4, 12)))
    assert list(rig.core._conversations.table) == [second]


def test_a_leased_block_is_not_deleted() -> None:
    """It stays in the conversation, so that a second deletion finds it."""
    rig = disk_rig()
    conversation, session = store(rig, "c", range(4)), rig.session(spec("alice"))
    lease = run_to_end(rig.core.lookup(session, keys([0]), LookupSpec(lease_seconds=1e9), now=0)).lease
    assert lease is not None
    delete = BlockAction.DELETE
    assert work(rig, rig.core.act_on_conversations(delete, [conversation])) == ActionCounts(changed=3, kept=1)
    rig.core.release(session, lease.id)
    assert work(rig, rig.core.act_on_conversations(delete, [conversation])) == ActionCounts(changed=1)
    assert not rig.visible("alice") | rig.below("alice")


@pytest.mark.parametrize("action", [BlockAction.RELEASE, BlockAction.DEMOTE, BlockAction.DELETE])
def test_only_unpinning_changes_pinned_blocks(action: BlockAction) -> None:
    """Neither an action on the conversation nor one on its keys."""
    rig = disk_rig()
    conversation = store(rig, "c", range(8))
    assert work(rig, rig.core.act_on_conversations(BlockAction.PIN, [conversation])).changed == 8
    assert work(rig, rig.core.act_on_conversations(action, [conversation])) == ActionCounts(kept=8)
    assert work(rig, rig.core.act_on_keys(action, [(spec("alice").id, keys(range(8)))])) == ActionCounts(kept=8)
    rig.tick(86400 * 365)
    flood(rig)
    assert set(keys(range(8))) <= rig.visible("alice")
    assert work(rig, rig.core.act_on_conversations(BlockAction.UNPIN, [conversation])) == ActionCounts(changed=8)
    assert rig.share("alice").retained == 0


def test_actions_on_keys_need_no_conversation() -> None:
    rig = disk_rig()
    rig.store("alice", range(8))
    namespace = spec("alice").id
    some = keys([*range(8), 90, 0])
    assert work(rig, rig.core.act_on_keys(BlockAction.RETAIN, [(namespace, some)], 60)) == ActionCounts(
        changed=8, missing=1
    )
    flood(rig)
    assert set(keys(range(8))) <= rig.visible("alice")
    assert work(rig, rig.core.act_on_keys(BlockAction.RELEASE, [(namespace, some)])) == ActionCounts(
        changed=8, missing=1
    )
    assert work(rig, rig.core.act_on_keys(BlockAction.DEMOTE, [(namespace, some)])) == ActionCounts(
        changed=8, missing=1
    )
    assert work(rig, rig.core.act_on_keys(BlockAction.DELETE, [(namespace, some)])) == ActionCounts(
        changed=8, missing=1
    )
    assert not set(keys(range(8))) & (rig.visible("alice") | rig.below("alice"))


def test_the_use_of_each_tier_is_counted() -> None:
    rig = Rig(tiers=[ModelTier("disk", 4096 * PAGE)])
    conversation = store(rig, "c", range(8))
    work(rig, rig.core.act_on_keys(BlockAction.RETAIN, [(spec("alice").id, keys(range(2)))], 60))
    found = run_to_end(rig.core.use_of_conversation(conversation))
    assert found == [TierUse(8, 8 * PAGE, 2), TierUse(8, 8 * PAGE, 2)]


def test_pages_list_the_newest_first() -> None:
    rig = Rig()
    names = [store(rig, name, range(2)) for name in ("a", "b", "c")]
    store(rig, "a", range(2))
    other = store(rig, "d", range(2), owner="bob")
    table = rig.core._conversations.table
    assert table.page(None, 0, 10) == [other, *names[::-1]]
    tag = spec("alice").id[:16]
    assert table.page(tag, 0, 2) == [names[2], names[1]]
    assert table.page(tag, names[1].number, 2) == [names[0]]
    assert (table.named(tag, "d"), table.named(None, "d")) == ([], [other])
    assert (table.count_of(tag), table.count_of(None), table.count_of(b"none")) == (3, 4, 0)


def test_a_prompt_has_the_keys_up_to_its_last() -> None:
    """Of the conversation that was used last."""
    rig = Rig()
    store(rig, "old", range(6))
    conversation = store(rig, "new", range(2, 8))
    table, tag = rig.core._conversations.table, spec("alice").id[:16]
    assert table.prompts(tag, keys([4])[0]) == [(conversation.namespace, keys(range(2, 5)))]
    assert table.prompts(tag, keys([90])[0]) == table.prompts(b"none", keys([4])[0]) == []


@pytest.mark.parametrize("action", [BlockAction.RELEASE, BlockAction.DEMOTE, BlockAction.UNPIN])
def test_the_end_of_a_retention_also_holds_for_copies(action: BlockAction) -> None:
    """A tier that gets a block later retains it no longer than the block is retained now."""
    rig = disk_rig()
    conversation = store(rig, "c", range(4))
    work(rig, rig.core.act_on_conversations(BlockAction.RETAIN, [conversation], 900.0))
    blocks = [rig.core._cpu_tier.blocks_of(spec("alice").id)[key] for key in keys(range(4))]
    assert [block.retain_until for block in blocks] == [900.0] * 4
    work(rig, rig.core.act_on_conversations(action, [conversation]))
    assert [block.retain_until for block in blocks] == [0.0] * 4


def test_a_request_is_a_use_of_its_conversation() -> None:
    """The age counts from the first request, and the idle time from the latest one."""
    table, session = ConversationTable(), Rig().session(spec("alice"))
    conversation = table.begin_request(session, "c", 5.0)
    assert table.begin_request(session, "c", 9.0) is conversation
    assert (conversation.created_at, conversation.used_at) == (5.0, 9.0)


@pytest.mark.parametrize("own", [10.0, 2000.0])
def test_the_longer_one_of_two_retentions_applies(own: float) -> None:
    """That of a call, and that of its conversation."""
    rig = disk_rig()
    conversation = store(rig, "c", range(4))
    work(rig, rig.core.act_on_conversations(BlockAction.RETAIN, [conversation], 900.0))
    begin(rig, "c")
    session = rig.session(spec("alice"))
    options = LookupSpec(request_id="r", retain_for=own, lease_seconds=60)
    steps = Steps(rig.core.lookup(session, keys(range(4)), options, now=0), "lookup")
    assert steps.state.retain_until == max(own, 900.0)


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("was_pinned", [False, True])
def test_a_cancelled_pin_leaves_no_pinned_block(
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    was_pinned: bool,  # noqa: FBT001
) -> None:
    """Blocks that were pinned before stay so. Later requests do not retain their blocks."""
    monkeypatch.setattr(conversation_actions, "SLICE", 4)
    rig = disk_rig()
    conversation = store(rig, "chat", range(12))
    if was_pinned:
        work(rig, rig.core.act_on_conversations(BlockAction.PIN, [conversation]))
    pin = Steps(rig.core.act_on_conversations(BlockAction.PIN, [conversation]))
    for _ in range(steps):
        assert pin.step()
    pin.operation.close()
    work_off(rig)
    assert retained(rig, conversation) == ([12, 12] if was_pinned else [0, 0])
    assert (conversation.pinned, conversation.retain_until > 0) == (was_pinned, was_pinned)


def test_a_cancelled_pin_of_keys_unpins_only_what_it_has_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_actions, "SLICE", 4)
    rig = disk_rig()
    conversation = store(rig, "chat", range(12))
    names, namespace = keys(range(12)), spec("alice").id
    work(rig, rig.core.act_on_keys(BlockAction.PIN, [(namespace, names[:2])]))
    pin = Steps(rig.core.act_on_keys(BlockAction.PIN, [(namespace, names)]))
    for _ in range(6):
        assert pin.step()
    assert min(retained(rig, conversation)) > 2
    pin.operation.close()
    work_off(rig)
    assert retained(rig, conversation) == [2, 2]


def cancel_pin(rig: Rig, conversation: Conversation) -> None:
    """Pins most blocks of a conversation, and cancels the action."""
    pin = Steps(rig.core.act_on_conversations(BlockAction.PIN, [conversation]))
    for _ in range(6):
        assert pin.step()
    assert min(retained(rig, conversation)) >= 8
    pin.operation.close()


@pytest.mark.parametrize("seconds", [50, 70])
def test_a_cancelled_pin_keeps_an_earlier_retention(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """It lasts 60 s, for the blocks and for those of later requests."""
    monkeypatch.setattr(conversation_actions, "SLICE", 4)
    rig = disk_rig()
    conversation = store(rig, "chat", range(12))
    work(rig, rig.core.act_on_conversations(BlockAction.RETAIN, [conversation], seconds=60))
    cancel_pin(rig, conversation)
    work_off(rig)
    assert conversation.retain_until == 60
    rig.core.tick(seconds)
    work_off(rig)
    assert retained(rig, conversation) == ([12, 12] if seconds < 60 else [0, 0])


@pytest.mark.parametrize("action", [BlockAction.PIN, BlockAction.RETAIN])
def test_an_action_after_a_cancelled_pin_applies(monkeypatch: pytest.MonkeyPatch, action: BlockAction) -> None:
    """It begins before the core has ended what the cancelled one retained."""
    monkeypatch.setattr(conversation_actions, "SLICE", 4)
    rig = disk_rig()
    conversation = store(rig, "chat", range(12))
    cancel_pin(rig, conversation)
    steps = Steps(rig.core.act_on_conversations(action, [conversation], seconds=60))
    while steps.step():
        pass
    work_off(rig)
    assert retained(rig, conversation) == [12, 12]
    rig.core.tick(70)
    work_off(rig)
    assert retained(rig, conversation) == ([12, 12] if action is BlockAction.PIN else [0, 0])
