"""Table of all metrics: name, type, labels, unit and help text.

All exposed metrics are built from it, and `tools/metrics_page.py` writes `docs/metrics.md` from it.
Exposed counters get the suffix `_total`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["METRICS", "SECTIONS", "TRANSPORTS", "Kind", "Row"]

Kind = Literal["counter", "gauge", "histogram", "info"]

TRANSPORTS = ("shm", "tcp", "grpc", "cuda_ipc")
"""Transports of sessions; other names that clients send count as `other`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One metric."""

    name: str
    kind: Kind
    text: str
    """Help text: one sentence."""
    labels: tuple[str, ...] = ()
    unit: str = ""
    """Unit of the value."""

    @property
    def exposed(self) -> str:
        """Name in queries."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


def _rows(unit: str, kind: Kind, labels: Sequence[str], **texts: str) -> tuple[Row, ...]:
    return tuple(Row(f"kvtier_{name}", kind, text, tuple(labels), unit) for name, text in texts.items())


SECTIONS: dict[str, tuple[Row, ...]] = {
    "The server": (
        *_rows("", "info", ("version", "python", "epoch"), build="Version, and random id of the server process."),
        *_rows("0 or 1", "gauge", (), snapshot_ok="Whether the statistics of the tiers could be read."),
        *_rows("seconds", "gauge", (), uptime_seconds="Time since the server was ready."),
        *_rows("0 or 1", "gauge", (), draining="Whether the server is shutting down."),
        *_rows(
            "seconds",
            "histogram",
            (),
            loop_lag_seconds="Delay of the event loop's timer: the minimum wait of every call.",
        ),
        *_rows(
            "failures",
            "counter",
            ("work",),
            loop_failures="Failures of background work: `tick` (expiry), `slice` (resets and evictions) or `watch` (health).",
        ),
        *_rows(
            "bytes",
            "gauge",
            (),
            region_bytes="Size of the host region.",
            region_backed_bytes="Bytes of the region that are backed by memory.",
        ),
    ),
    "Calls and sessions": (
        *_rows(
            "seconds", "histogram", ("method", "code"), rpc_duration_seconds="Duration of calls, including streams."
        ),
        *_rows(
            "calls",
            "counter",
            ("service", "reason"),
            refusals="Calls that were refused or failed, by the reason that the client gets.",
        ),
        *_rows("sessions", "gauge", ("transport",), sessions="Open sessions."),
        *_rows(
            "sessions",
            "gauge",
            (),
            sessions_attached="Open sessions whose process has mapped the region.",
            sessions_limit="Maximum number of open sessions (`limits.max_sessions`).",
        ),
        *_rows(
            "sessions",
            "counter",
            (),
            sessions_opened="Sessions opened.",
            sessions_closed="Sessions ended, for any reason.",
        ),
    ),
    "Lookups": (
        *_rows(
            "keys",
            "counter",
            (),
            lookup_keys="Looked-up keys: each is a hit in a tier, or a miss.",
        ),
        *_rows("keys", "counter", ("reason",), lookup_misses="Looked-up keys that were misses, by reason."),
        *_rows(
            "ratio",
            "gauge",
            ("tier", "scale"),
            estimated_hit_ratio="Estimated share of recently looked-up keys that the tier and those above it would have, if the"
            " tier had this multiple of its size.",
        ),
    ),
    "Tiers": (
        *_rows("", "info", ("tier", "type", "position"), tier="The tiers, in lookup order."),
        *_rows(
            "bytes",
            "gauge",
            ("tier",),
            tier_capacity_bytes="Maximum size of the tier.",
            tier_available_bytes="Bytes that the tier can hold now.",
            tier_used_bytes="Bytes that the tier holds.",
            tier_queued_bytes="Bytes that wait to be stored in the tier or are being stored.",
        ),
        *_rows("blocks", "gauge", ("tier",), tier_blocks="Blocks that the tier holds."),
        *_rows("jobs", "gauge", ("tier",), tier_jobs="Jobs of the tier that wait or run."),
        *_rows("0 or 1", "gauge", ("tier",), tier_healthy="Whether the tier has no error."),
        *_rows(
            "keys",
            "counter",
            ("tier",),
            tier_hits="Keys found in the tier.",
            tier_misses="Keys looked up in the tier and not found.",
        ),
        *_rows(
            "blocks",
            "counter",
            ("tier",),
            tier_evictions="Blocks evicted from the tier.",
            tier_damaged="Blocks that a load or a check found damaged; they are removed and never served.",
            tier_dropped="Blocks not stored in the tier because its queue or the tier was full.",
            tier_declined="Blocks not admitted to the tier by its `admission` setting.",
            tier_expired="Blocks removed from the tier because they were not used within its ttl.",
            tier_not_retained="Blocks that could not be retained in the tier because its limit was reached.",
        ),
        *_rows(
            "seconds",
            "histogram",
            ("tier", "operation"),
            tier_job_duration_seconds="Duration of jobs on tiers, without the time in the queue.",
        ),
        *_rows("bytes", "counter", ("tier", "operation"), tier_job_bytes="Bytes that jobs on tiers moved."),
        *_rows(
            "blocks",
            "counter",
            ("tier", "operation", "outcome"),
            tier_job_blocks="Blocks of jobs on tiers, by outcome.",
        ),
        *_rows(
            "frames or blocks",
            "counter",
            ("where",),
            checksum_mismatches="Blocks or frames with a wrong checksum, by place: a tier, or `grpc` for streams.",
        ),
    ),
    "Tenants and namespaces": (
        *_rows(
            "bytes",
            "gauge",
            ("tier", "tenant"),
            tenant_used_bytes="Bytes that the tenant holds in the tier; the empty name stands for all tenants without a share.",
            tenant_quota_bytes="Bytes of the tier that the tenant is guaranteed.",
            tenant_limit_bytes="Maximum bytes of the tenant in the tier; absent if there is no limit.",
            tenant_retained_bytes="Bytes of the tenant in the tier that may not be evicted yet.",
        ),
        *_rows("namespaces", "gauge", (), namespaces="Namespaces seen since start."),
        *_rows(
            "",
            "info",
            ("namespace", "tenant", "model"),
            namespace="Namespaces with their tenant and model.",
        ),
        *_rows(
            "blocks",
            "gauge",
            ("tier", "namespace", "tenant"),
            namespace_blocks="Blocks of the namespace that the tier holds.",
        ),
        *_rows(
            "keys",
            "counter",
            ("tier", "namespace", "tenant"),
            namespace_hits="Keys of the namespace found in the tier.",
        ),
        *_rows(
            "keys",
            "counter",
            ("namespace", "tenant", "reason"),
            namespace_misses="Looked-up keys of the namespace that were misses, by reason; reasons with no miss are absent.",
        ),
    ),
    "Leases, stores, transfers": (
        *_rows("leases", "gauge", (), leases="Active leases."),
        *_rows(
            "seconds",
            "gauge",
            (),
            oldest_lease_seconds="Age of the oldest lease, including renewals.",
        ),
        *_rows(
            "leases",
            "counter",
            (),
            leases_expired="Leases that expired because the client neither released nor renewed them.",
        ),
        *_rows("stores", "gauge", (), stores="Stores in flight."),
        *_rows(
            "stores",
            "counter",
            (),
            stores_expired="Stores that expired because the client did not renew them.",
        ),
        *_rows(
            "bytes",
            "gauge",
            (),
            quarantined_bytes="Bytes in quarantine: a client whose store has ended may still write to them.",
        ),
        *_rows(
            "bytes",
            "counter",
            ("transport", "direction"),
            transfer_bytes="Bytes that the server moved between engines and the region. Copies by clients that have mapped the"
            " region are not counted.",
        ),
    ),
    "Hand-offs": (
        *_rows("requests", "gauge", ("direction",), holds="Requests held for another engine."),
        *_rows(
            "bytes",
            "gauge",
            (),
            held_bytes="Bytes of the CPU tier that holds pin; a block of several holds counts once.",
        ),
        *_rows(
            "requests",
            "counter",
            ("direction",),
            handoffs_published="Requests published for another engine.",
            handoffs_declined="Requests that were not held because a limit was reached.",
            handoffs_claimed="Claims that were granted at least one block.",
            handoffs_released="Holds released by an engine.",
            handoffs_expired="Holds that expired before they were released.",
            handoffs_dropped="Holds that ended with a reset or were published again.",
        ),
        *_rows("bytes", "counter", ("direction",), handoffs_claimed_bytes="Bytes of blocks that claims were granted."),
        *_rows(
            "seconds",
            "counter",
            ("direction",),
            handoffs_held_seconds="Total time for which ended holds had pinned their blocks.",
        ),
        *_rows(
            "claims",
            "counter",
            ("outcome",),
            handoffs_claims_missed="Claims that found no hold, by outcome.",
        ),
    ),
}
"""Metrics by subject."""

METRICS: dict[str, Row] = {row.name: row for rows in SECTIONS.values() for row in rows}
