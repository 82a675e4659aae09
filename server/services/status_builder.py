"""Builds the status of a server for `AdminService.GetStatus` and the status page."""

from __future__ import annotations

import os
from collections import defaultdict

from ... import __version__
from ...protos.v1 import admin_pb2
from ...tiers.core.leases import BlockLease
from ...tiers.core.stores import Store
from ..rpc.sessions import PROTOCOL_VERSIONS, SessionRegistry
from ..runtime import TierRuntime
from ..telemetry.loop_lag import LoopLag
from .admin_messages import handoff_totals, miss_counts, region_status, session_status, tier_status

__all__ = ["StatusBuilder"]


class StatusBuilder:
    def __init__(self, runtime: TierRuntime, sessions: SessionRegistry, ready_at: float, loop_lag: LoopLag) -> None:
        """`ready_at` is in seconds on the runtime's clock."""
        self._runtime = runtime
        self._sessions = sessions
        self._ready_at = ready_at
        self._loop_lag = loop_lag

    def status(self) -> admin_pb2.GetStatusResponse:
        runtime, sessions = self._runtime, self._sessions
        stats, now = runtime.stats(), runtime.now()
        held: dict[bytes, list[BlockLease | Store]] = defaultdict(list)
        for lease in runtime.core.leases():
            held[lease.owner.session_id].append(lease)
        for store in runtime.core.stores():
            held[store.owner.session_id].append(store)
        answer = admin_pb2.GetStatusResponse(
            server_version=__version__,
            epoch=sessions.epoch,
            draining=sessions.draining,
            tiers=map(tier_status, stats.tiers),
            sessions=[session_status(session, held.get(session.core.id, ()), now) for session in sessions.all()],
            leases=stats.leases,
            stores=stats.stores,
            quarantined_bytes=stats.quarantined_bytes,
            namespaces=stats.namespaces,
            holds=stats.holds,
            held_bytes=stats.held_bytes,
            handoffs=[handoff_totals(direction, totals) for direction, totals in stats.handoffs.items()],
            pid=os.getpid(),
            protocol_versions=PROTOCOL_VERSIONS,
            region=region_status(runtime.region),
            lookup_keys=stats.lookup_keys,
            lookup_misses=stats.lookup_misses,
            misses=miss_counts(stats.misses_by_reason),
        )
        answer.uptime.FromNanoseconds(int((now - self._ready_at) * 1e9))
        answer.loop_lag.FromNanoseconds(int(self._loop_lag.worst * 1e9))
        return answer
