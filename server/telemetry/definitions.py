"""Table of all metrics: name, type, unit, labels and help text.

The server exposes these metrics, and `tools/metrics_page.py` writes `docs/metrics.md` from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

__all__ = ["METRICS", "SECTIONS", "SOURCE_OUTCOMES", "TRANSPORTS", "Kind", "MetricDefinition"]

Kind = Literal["counter", "gauge", "histogram", "info"]

TRANSPORTS = ("shm", "tcp", "grpc", "cuda_ipc")
"""Transports of sessions. A session with another transport counts as `other`."""

SOURCE_OUTCOMES = ("found", "absent", "not_needed", "not_listed", "unreachable", "refused", "busy")
"""Outcomes of a search at the server that a call names as its source."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    text: str

    @property
    def exposed(self) -> str:
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


def _define(kind: Kind, name: str, unit: str, labels: str, text: str) -> MetricDefinition:
    return MetricDefinition(f"kvtier_{name}", kind, unit, tuple(labels.split()), text)


_counter = partial(_define, "counter")
_gauge = partial(_define, "gauge")
_histogram = partial(_define, "histogram")
_info = partial(_define, "info")

SECTIONS: dict[str, tuple[MetricDefinition, ...]] = {
    "The server": (
        _info(
            "build",
            "",
            "version python epoch",
            "Versions of kvtier and Python, and the random id of this server process.",
        ),
        _gauge(
            "snapshot_ok",
            "0 or 1",
            "",
            "Whether this scrape could read the server's statistics. If not, most metrics are absent.",
        ),
        _gauge("uptime_seconds", "seconds", "", "Time since the server was ready."),
        _gauge(
            "downgrades",
            "causes",
            "feature",
            "Paths that are slower now and features that are absent now; `kvtier status` shows each cause.",
        ),
        _gauge("draining", "0 or 1", "", "Whether the server drains: it refuses new work."),
        _histogram("loop_lag_seconds", "seconds", "", "Delay of the event loop. Calls wait for at least this time."),
        _counter(
            "loop_failures",
            "failures",
            "work",
            "Failures of background work: `tick` (expiry), `slice` (resets, evictions) or `watch` (health).",
        ),
        _gauge("region_bytes", "bytes", "", "Size of the region (shared memory)."),
        _gauge("region_backed_bytes", "bytes", "", "Bytes of the region that are backed by memory pages."),
    ),
    "Calls and sessions": (
        _histogram("rpc_duration_seconds", "seconds", "method code", "Duration of calls, including streams."),
        _counter("refusals", "calls", "service reason", "Calls refused or failed, by the reason sent to the client."),
        _gauge("sessions", "sessions", "transport", "Open sessions."),
        _gauge("sessions_attached", "sessions", "", "Open sessions whose process has mapped the region."),
        _gauge("sessions_limit", "sessions", "", "Maximum number of open sessions (`limits.max_sessions`)."),
        _counter("sessions_opened", "sessions", "", "Sessions opened."),
        _counter("sessions_closed", "sessions", "", "Sessions that have ended, for any reason."),
    ),
    "Lookups": (
        _counter(
            "lookup_keys",
            "keys",
            "",
            "Keys looked up. A key counts when it is known to be a hit in one tier or a miss.",
        ),
        _counter("lookup_misses", "keys", "reason", "Keys looked up that were misses, by reason."),
        _gauge(
            "estimated_hit_ratio",
            "ratio",
            "tier scale",
            "Estimated hit ratio of this tier and all tiers above it if this tier had `scale` times its size.",
        ),
    ),
    "Tiers": (
        _info(
            "tier",
            "",
            "tier type position shared",
            "The tiers, in lookup order. `shared` is `yes` if other servers use the same store, otherwise `no`.",
        ),
        _gauge("tier_capacity_bytes", "bytes", "tier", "Maximum size of the tier."),
        _gauge("tier_available_bytes", "bytes", "tier", "Bytes that the tier can hold now."),
        _gauge("tier_used_bytes", "bytes", "tier", "Bytes that the tier holds."),
        _gauge("tier_queued_bytes", "bytes", "tier", "Bytes that wait to be stored in the tier or are being stored."),
        _gauge("tier_blocks", "blocks", "tier", "Blocks that the tier holds."),
        _gauge("tier_jobs", "jobs", "tier", "Jobs of the tier that wait or run."),
        _gauge("tier_healthy", "0 or 1", "tier", "1 if the tier works, 0 if it is in trouble."),
        _counter("tier_hits", "keys", "tier", "Keys found in the tier."),
        _counter("tier_misses", "keys", "tier", "Keys looked up in the tier and not found."),
        _counter("tier_evictions", "blocks", "tier", "Blocks evicted from the tier."),
        _counter("tier_damaged", "blocks", "tier", "Damaged blocks found and removed. Engines never get them."),
        _counter("tier_dropped", "blocks", "tier", "Blocks not stored because the tier or its queue was full."),
        _counter(
            "tier_declined",
            "blocks",
            "tier",
            "Times that the tier did not store a block because of its `admission` setting or its eviction policy. "
            "A block can count several times.",
        ),
        _counter(
            "tier_expired", "blocks", "tier", "Blocks removed because they were not used within the tier's `ttl`."
        ),
        _counter(
            "tier_not_retained",
            "blocks",
            "tier",
            "Blocks not retained in the tier: a limit was reached, or their extent retires.",
        ),
        _histogram(
            "tier_job_duration_seconds",
            "seconds",
            "tier operation",
            "Duration of the tier's jobs, without the time in the queue.",
        ),
        _counter("tier_job_bytes", "bytes", "tier operation", "Bytes that jobs stored in or loaded from the tier."),
        _counter("tier_job_blocks", "blocks", "tier operation outcome", "Blocks of the tier's jobs, by outcome."),
        _counter(
            "checksum_mismatches",
            "frames or blocks",
            "where",
            "Checksum mismatches of blocks (`where` is a tier; `cpu`: in memory) or of streamed frames (`where` is `grpc`).",
        ),
        _counter(
            "wrong_blocks",
            "blocks",
            "",
            "Whole blocks that differ from the KV that an engine computes for their keys (audits). They were removed.",
        ),
    ),
    "Tenants and namespaces": (
        _gauge(
            "tenant_used_bytes",
            "bytes",
            "tier tenant",
            'Bytes of the tenant in the tier. The tenant `""` stands for all tenants without quota and limit.',
        ),
        _gauge("tenant_quota_bytes", "bytes", "tier tenant", "Bytes of the tier that are guaranteed to the tenant."),
        _gauge(
            "tenant_limit_bytes",
            "bytes",
            "tier tenant",
            "Maximum bytes of the tenant in the tier; absent without a limit.",
        ),
        _gauge(
            "tenant_retained_bytes",
            "bytes",
            "tier tenant",
            "Bytes of the tenant in the tier that are retained, so that they cannot be evicted.",
        ),
        _gauge("namespaces", "namespaces", "", "Namespaces seen since the start of the server."),
        _info("namespace", "", "namespace tenant model", "Namespaces with their tenant and model."),
        _gauge("namespace_blocks", "blocks", "tier namespace tenant", "Blocks of the namespace that the tier holds."),
        _counter("namespace_hits", "keys", "tier namespace tenant", "Keys of the namespace found in the tier."),
        _counter("namespace_misses", "keys", "namespace tenant reason", "Missed keys of the namespace, by reason."),
    ),
    "Leases, stores, transfers": (
        _gauge("leases", "leases", "", "Active leases."),
        _gauge("oldest_lease_seconds", "seconds", "", "Time since the oldest active lease was granted."),
        _counter("leases_expired", "leases", "", "Leases that expired before the client released them."),
        _gauge("room_waiting", "lookups", "", "Lookups that wait for room in the CPU tier."),
        _counter("room_waits", "lookups", "", "Lookups that began to wait for room in the CPU tier."),
        _counter("room_waited_seconds", "seconds", "", "Duration of all ended waits for room in the CPU tier."),
        _gauge("stores", "stores", "", "Stores in flight."),
        _counter("stores_expired", "stores", "", "Stores that expired because the client did not renew them."),
        _gauge(
            "quarantined_bytes",
            "bytes",
            "",
            "Bytes that the server does not reuse yet, because the process of an ended store may still write to them.",
        ),
        _counter(
            "transfer_bytes",
            "bytes",
            "transport direction",
            "Bytes that the server transferred to and from engines. Copies by clients in shared memory do not count.",
        ),
    ),
    "Other servers": (
        _counter(
            "source_searches",
            "searches",
            "outcome",
            "Searches for missing blocks at the server that a call named, by outcome. The loads count as jobs of the tier "
            "`peers`.",
        ),
    ),
    "Hand-offs": (
        _gauge("holds", "requests", "direction", "Requests held for another engine."),
        _gauge("held_bytes", "bytes", "", "Bytes of the CPU tier that holds pin. A block counts once."),
        _counter("handoffs_published", "requests", "direction", "Requests published for another engine."),
        _counter("handoffs_declined", "requests", "direction", "Requests not held because a limit was reached."),
        _counter("handoffs_claimed", "requests", "direction", "Claims that got at least one block."),
        _counter("handoffs_released", "requests", "direction", "Holds released by an engine."),
        _counter("handoffs_expired", "requests", "direction", "Holds that expired before they were released."),
        _counter(
            "handoffs_dropped", "requests", "direction", "Holds that ended because of a reset or a new publication."
        ),
        _counter("handoffs_claimed_bytes", "bytes", "direction", "Bytes of the blocks that claims got."),
        _counter(
            "handoffs_held_seconds", "seconds", "direction", "Total time for which ended holds pinned their blocks."
        ),
        _counter(
            "handoffs_claims_missed",
            "claims",
            "outcome",
            "Requests that an engine computed instead of pulling them, by outcome of the claim.",
        ),
    ),
    "Conversations": (
        _gauge("conversations", "conversations", "", "Conversations whose keys the server has recorded."),
        _gauge("conversation_keys", "keys", "", "Keys of these conversations. A key counts once per conversation."),
        _counter("conversations_forgotten", "conversations", "", "Conversations forgotten because of a limit."),
    ),
}
"""Metrics by subject. Each row is `kind(name, unit, labels, help text)`."""

METRICS: dict[str, MetricDefinition] = {metric.name: metric for metrics in SECTIONS.values() for metric in metrics}
