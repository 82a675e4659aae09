"""The core has one door: the public names of `TierManager`."""

from collections.abc import Callable

import pytest
from core_rig import Rig, keys
from harness.operations import Steps, run_to_end
from hold_rig import P2D, HoldRig

from kvtier.tiers.core.bulk_eviction import EvictionRequest
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.conversation_actions import BlockAction
from kvtier.tiers.core.operations import Operation
from kvtier.tiers.types import StoreAnswer

OPERATIONS = [
    "act_on_conversations",
    "act_on_keys",
    "claim",
    "complete_store",
    "flush",
    "lookup",
    "prefetch",
    "prepare_store",
    "publish",
    "query_shared_tiers",
    "use_of_conversation",
]
"""Generators. `evict` returns an eviction, whose `run` is one."""

EVENTS = [
    "add_memory",
    "begin_request",
    "close_session",
    "describe",
    "end_reader",
    "entries_lost",
    "evict",
    "find_hold",
    "finish_request",
    "flush_queues",
    "former_writer_gone",
    "job_finished",
    "locate",
    "lookup_finished",
    "not_claimed",
    "open_session",
    "recover",
    "region_unmapped",
    "release",
    "release_hold",
    "remove_damaged",
    "remove_wrong",
    "renew",
    "renew_hold",
    "renew_store",
    "replay_events",
    "reset",
    "store_skipped",
    "take_back_hits",
    "take_commands",
    "tick",
    "tier_stalled",
    "unwatch_events",
    "watch_events",
    "withdraw",
    "work",
    "writer_attached",
    "writer_done",
    "writer_gone",
]

QUESTIONS = [
    "content_of",
    "conversations_named",
    "count_conversations",
    "excluded",
    "explain",
    "has_work",
    "holds",
    "is_quarantined",
    "is_settled",
    "keeps_contents",
    "lacking",
    "lease",
    "lease_of_grant",
    "leases",
    "may_come",
    "namespace_stats",
    "page_of_conversations",
    "pool_of",
    "prompts",
    "resetting",
    "session",
    "stats",
    "store",
    "store_of_grant",
    "stores",
]


def test_the_core_has_no_other_public_names() -> None:
    """No part of the core is public, so that services depend on none of them."""
    core = Rig().core
    names = {name for name in dir(core) if not name.startswith("_")}
    assert names == {*OPERATIONS, *EVENTS, *QUESTIONS}
    assert all(callable(getattr(core, name)) for name in names - {"keeps_contents"})


def started(rig: HoldRig, name: str) -> Operation[object]:
    """Returns an operation of this name on blocks that are stored or held; a slice has two keys."""
    core, session, some, new = rig.core, rig.session, keys(*range(8)), keys(*range(20, 28))
    conversation = core._conversations.table.begin_request(session, "c", 0.0)
    core._conversations.table.add(conversation, some)

    def store() -> Operation[StoreAnswer]:
        return core.prepare_store(session, new, StoreSpec(lease_seconds=60), now=0, slice_keys=2)

    def completion() -> Operation[object]:
        store_id = run_to_end(store()).store_id
        assert store_id is not None
        return core.complete_store(session, store_id, slice_blocks=2)

    sizes = {"num_tokens": 8, "duration": 30.0}
    calls: dict[str, Callable[[], Operation[object]]] = {
        "act_on_conversations": lambda: core.act_on_conversations(BlockAction.DEMOTE, [conversation]),
        "act_on_keys": lambda: core.act_on_keys(BlockAction.DEMOTE, [(session.namespace.id, some)]),
        "claim": lambda: core.claim(
            rig.reader, rig.name("held"), first_positions=[], request_id="", lease_seconds=60, now=0, slice_keys=2
        ),
        "complete_store": completion,
        "evict": lambda: core.evict(EvictionRequest([0])).run(),
        "flush": lambda: core.flush(session.namespace.id, some, slice_keys=2),
        "lookup": lambda: core.lookup(session, some, LookupSpec(lease_seconds=60), now=0, slice_keys=2),
        "prefetch": lambda: core.prefetch(session, some, LookupSpec(), now=0, slice_keys=2),
        "prepare_store": store,
        "publish": lambda: core.publish(session, "r", new, range(8), direction=P2D, now=0, slice_keys=2, **sizes),
        "query_shared_tiers": lambda: core.query_shared_tiers(session, some, prefix=False, deadline=0, now=0),
        "use_of_conversation": lambda: core.use_of_conversation(conversation),
    }
    return calls[name]()


def owned(rig: HoldRig) -> tuple[int, int, int, int]:
    """Returns the numbers of leases, stores, holds and pins."""
    pins = sum(block.pins for block in rig.core._cpu_tier._index)
    return len(rig.core.leases()), len(rig.core.stores()), len(rig.core.holds()), pins


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("name", [*OPERATIONS, "evict"])
def test_an_operation_that_ends_early_leaves_nothing(name: str, steps: int) -> None:
    """The close undoes it, and not the garbage collector: the test still has the operation."""
    rig = HoldRig(extents=2)
    rig.store(keys(*range(8)))
    rig.publish(keys(*range(8)), "held")
    before = owned(rig)
    operation = started(rig, name)
    step = Steps(operation)
    for _ in range(steps):
        if not step.step():
            return
    operation.close()
    rig.core.work()
    if name != "complete_store" or steps:  # a completion that has not begun leaves its store
        assert owned(rig) == before
