"""Names that clients choose take bounded memory: of namespaces, engines, requests and tenants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_rig import SPEC, Rig, keys
from harness.operations import run_to_end
from simulation import ModelTier

from kvtier.tiers.core.block_index import KEPT_EMPTY
from kvtier.tiers.core.call_specs import LookupSpec
from kvtier.tiers.errors import LeaseNotFound, LimitExceeded, NotOwner
from kvtier.tiers.secondary_tier import NamespaceId, RequestInfo
from kvtier.tiers.types import NamespaceSpec

NAMES = 3 * KEPT_EMPTY


def spec(number: int) -> NamespaceSpec:
    return NamespaceSpec(NamespaceId(b"%016d" % number), world_size=1, part_bytes=(4096,))


def store_and_go(rig: Rig, number: int) -> None:
    rig.session = rig.open(f"engine {number}", spec(number))
    rig.store(keys(number))
    rig.look_up(keys(number + 1))
    rig.core.close_session(rig.session.id)


def look_up_and_go(rig: Rig, number: int) -> None:
    rig.session = rig.open(f"engine {number}", spec(number))
    rig.look_up(keys(number))
    rig.core.begin_request(rig.session, RequestInfo(f"request {number}", spec(number).id))
    rig.core.close_session(rig.session.id)


@pytest.mark.parametrize("visit", [store_and_go, look_up_and_go])
def test_namespaces_without_blocks_are_forgotten(visit: Callable[[Rig, int], None]) -> None:
    """Each session has a namespace of its own, whose block is evicted later."""
    rig = Rig(ModelTier("near", 16 * 4096))
    for number in range(NAMES):
        visit(rig, number)
        if not number % 256:
            rig.core.tick(float(number))
            rig.finish_jobs()
    rig.core.tick(float(NAMES))
    catalog = rig.core._tier_jobs.secondaries[0].catalog
    cpu_tier = rig.core._cpu_tier
    assert len(cpu_tier._index._by_namespace) < 2 * KEPT_EMPTY
    assert len(catalog._entries) < 2 * KEPT_EMPTY
    assert len(catalog._queue_of) < 2 * KEPT_EMPTY
    assert not rig.core._requests._requests
    assert not rig.core._requests._open


def test_tenants_share_no_limit_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant has one limit for all of its sessions, and another tenant has its own."""
    monkeypatch.setattr("kvtier.tiers.core.requests.MAX_REQUESTS", 4)
    rig = Rig()
    sessions = [
        rig.core.open_session(b"%d" % number, f"engine {number}", None, spec(1), tenant=tenant)
        for number, tenant in enumerate(["acme", "acme", "zeta"])
    ]
    for number in range(4):
        rig.core.begin_request(sessions[number % 2], RequestInfo(f"{number}", spec(1).id))
    for session in sessions[:2]:
        with pytest.raises(LimitExceeded):
            rig.core.begin_request(session, RequestInfo("more", spec(1).id))
    rig.core.begin_request(sessions[2], RequestInfo("other", spec(1).id))
    rig.core.close_session(sessions[0].id)
    rig.core.begin_request(sessions[1], RequestInfo("more", spec(1).id))


def test_equal_engine_ids_of_two_namespaces_are_separate() -> None:
    """Engines choose their ids: two tenants with the same id reach none of each other's blocks."""
    rig = Rig()
    rig.store(keys(0))
    lease = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(request_id="1", lease_seconds=60), now=0)).lease
    theirs = NamespaceSpec(NamespaceId(b"t" * 32), world_size=1, part_bytes=(4096,))
    stranger = rig.core.open_session(b"stranger", "engine", None, theirs, tenant="other")
    with pytest.raises(LeaseNotFound):  # as if there were no such lease
        rig.core.lease(stranger, lease.id)
    colleague = rig.core.open_session(b"colleague", "another engine", None, SPEC)
    with pytest.raises(NotOwner):
        rig.core.lease(colleague, lease.id)
    rig.core.finish_request(stranger, "1")
    assert rig.core.lease(rig.session, lease.id) is lease
