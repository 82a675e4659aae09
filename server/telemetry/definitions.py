"""The one table of all metrics: what each is called, counts and means.

Everything that a server exposes is made from a row of it, and `docs/metrics.md` is written from it (`tools/metrics_page.py`).
A counter's name gets `_total` at its end when it is exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["METRICS", "ROOMS", "TRANSPORTS", "Kind", "Row"]

Kind = Literal["counter", "gauge", "histogram", "info"]

TRANSPORTS = ("shm", "tcp", "grpc", "cuda_ipc")
"""How bytes of a session may move; whatever else a client claims counts as `other`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One metric."""

    name: str
    kind: Kind
    text: str
    """What it means: a sentence."""
    labels: tuple[str, ...] = ()
    unit: str = ""
    """What it counts or measures in."""

    @property
    def exposed(self) -> str:
        """Its name in queries."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


def _rows(unit: str, kind: Kind, labels: Sequence[str], **texts: str) -> tuple[Row, ...]:
    return tuple(Row(f"kvtier_{name}", kind, text, tuple(labels), unit) for name, text in texts.items())


ROOMS: dict[str, tuple[Row, ...]] = {
    "The server": (
        *_rows("", "info", ("version", "python", "epoch"), build="Version, and the random id of this server's life."),
        *_rows("0 or 1", "gauge", (), snapshot_ok="Whether the figures of the tiers could be read."),
        *_rows("seconds", "gauge", (), uptime_seconds="Time since the server was ready."),
        *_rows("0 or 1", "gauge", (), draining="Whether the server is shutting down."),
        *_rows(
            "seconds",
            "histogram",
            (),
            loop_lag_seconds="How much later than asked for the event loop wakes up: what every call waits at least.",
        ),
        *_rows(
            "failures",
            "counter",
            ("work",),
            loop_failures="Failures of what the server does besides calls: a `tick` (what expires), a `slice` (of resets and"
            " evictions), a `watch` (over its health).",
        ),
        *_rows(
            "bytes",
            "gauge",
            (),
            region_bytes="Size of the host region.",
            region_backed_bytes="What of the region has memory behind it.",
        ),
    ),
    "Calls and sessions": (
        *_rows("seconds", "histogram", ("method", "code"), rpc_duration_seconds="Duration of calls, streams included."),
        *_rows(
            "calls",
            "counter",
            ("service", "reason"),
            refusals="Calls that were refused or failed, by the reason that the client is told.",
        ),
        *_rows("sessions", "gauge", ("transport",), sessions="Open sessions."),
        *_rows(
            "sessions",
            "gauge",
            (),
            sessions_attached="Open sessions whose process has the region mapped.",
            sessions_limit="The most that may be open (`limits.max_sessions`).",
        ),
        *_rows(
            "sessions",
            "counter",
            (),
            sessions_opened="Sessions that were opened.",
            sessions_closed="Sessions that have ended, whatever the reason.",
        ),
    ),
    "What is looked up": (
        *_rows(
            "keys",
            "counter",
            (),
            lookup_keys="Looked-up keys that were answered for: each is a hit of a tier, or a miss.",
        ),
        *_rows("keys", "counter", ("reason",), lookup_misses="Looked-up keys that were misses, by reason."),
        *_rows(
            "ratio",
            "gauge",
            ("tier", "scale"),
            estimated_hit_ratio="Part of the keys looked up of late that the tier, or one above it, would answer if it had this"
            " many times its size.",
        ),
    ),
    "Tiers": (
        *_rows("", "info", ("tier", "type", "position"), tier="The tiers, in lookup order."),
        *_rows(
            "bytes",
            "gauge",
            ("tier",),
            tier_capacity_bytes="What the tier may hold at most.",
            tier_available_bytes="What the tier can hold now.",
            tier_used_bytes="What the tier holds.",
            tier_queued_bytes="What waits to be stored in the tier, or is being stored.",
        ),
        *_rows("blocks", "gauge", ("tier",), tier_blocks="Blocks that the tier holds."),
        *_rows("jobs", "gauge", ("tier",), tier_jobs="Jobs of the tier that wait or run."),
        *_rows("0 or 1", "gauge", ("tier",), tier_healthy="Whether all is well with the tier."),
        *_rows(
            "keys",
            "counter",
            ("tier",),
            tier_hits="Keys found in the tier.",
            tier_misses="Keys asked of the tier and not found in it.",
        ),
        *_rows(
            "blocks",
            "counter",
            ("tier",),
            tier_evictions="Blocks evicted from the tier.",
            tier_damaged="Blocks that were found damaged, by a load or by a check, and put out of use; none of them is served.",
            tier_dropped="Blocks not stored in the tier because its queue or the tier itself was full.",
            tier_declined="Uses of blocks that the tier's `admission` did not take in.",
            tier_expired="Blocks dropped from the tier because they were not used for as long as its ttl.",
            tier_not_retained="Blocks that requests wanted to retain in the tier, beyond what may be retained.",
        ),
        *_rows(
            "seconds",
            "histogram",
            ("tier", "operation"),
            tier_job_duration_seconds="Duration of jobs on tiers, the wait before not included.",
        ),
        *_rows("bytes", "counter", ("tier", "operation"), tier_job_bytes="Bytes that jobs on tiers moved."),
        *_rows(
            "blocks",
            "counter",
            ("tier", "operation", "outcome"),
            tier_job_blocks="Blocks of jobs on tiers, by what became of them.",
        ),
        *_rows(
            "frames or blocks",
            "counter",
            ("where",),
            checksum_mismatches="Bytes that were not what had been written, by where it showed: a tier, or `grpc` for streams.",
        ),
    ),
    "Tenants and namespaces": (
        *_rows(
            "bytes",
            "gauge",
            ("tier", "tenant"),
            tenant_used_bytes="What a tenant holds of the tier; the empty name is all who have no share of their own.",
            tenant_quota_bytes="What a tenant is guaranteed of the tier.",
            tenant_limit_bytes="The most that a tenant may hold of the tier; absent where there is no limit.",
            tenant_retained_bytes="What a tenant holds of the tier that may not be evicted for a while.",
        ),
        *_rows("namespaces", "gauge", (), namespaces="Namespaces seen since start."),
        *_rows(
            "",
            "info",
            ("namespace", "tenant", "model"),
            namespace="The namespaces that are told apart, with the model of their engines.",
        ),
        *_rows(
            "blocks",
            "gauge",
            ("tier", "namespace", "tenant"),
            namespace_blocks="Blocks of a namespace that the tier holds.",
        ),
        *_rows(
            "keys", "counter", ("tier", "namespace", "tenant"), namespace_hits="Keys of a namespace found in the tier."
        ),
        *_rows(
            "keys",
            "counter",
            ("namespace", "tenant", "reason"),
            namespace_misses="Looked-up keys of a namespace that were misses, by reason; a reason that has not been met is absent.",
        ),
    ),
    "Leases, stores, transfers": (
        *_rows("leases", "gauge", (), leases="Leases that are held."),
        *_rows(
            "seconds",
            "gauge",
            (),
            oldest_lease_seconds="For how long the oldest lease has been held, renewals included.",
        ),
        *_rows(
            "leases",
            "counter",
            (),
            leases_expired="Leases that ended because their time was over: whoever held them did not give them back.",
        ),
        *_rows("stores", "gauge", (), stores="Stores that are in flight."),
        *_rows(
            "stores",
            "counter",
            (),
            stores_expired="Stores that ended because their writer was silent for too long.",
        ),
        *_rows(
            "bytes",
            "gauge",
            (),
            quarantined_bytes="Bytes out of use: a process that lost its store, fallen or merely silent, may still write there.",
        ),
        *_rows(
            "bytes",
            "counter",
            ("transport", "direction"),
            transfer_bytes="Bytes between engines and the region that the server moves: those over networks. Copies of engines that"
            " have the region mapped pass the server by and are not counted.",
        ),
    ),
    "Requests that are handed over": (
        *_rows("requests", "gauge", ("direction",), holds="Requests that are held for another engine."),
        *_rows("bytes", "gauge", (), held_bytes="Bytes of the CPU tier that holds pin; what several hold counts once."),
        *_rows(
            "requests",
            "counter",
            ("direction",),
            handoffs_published="Requests that were held for another engine.",
            handoffs_declined="Requests that were not held: more than may be, or too many.",
            handoffs_claimed="Claims of held requests that were granted something.",
            handoffs_released="Holds that were given back.",
            handoffs_expired="Holds whose time was over before anybody gave them back.",
            handoffs_dropped="Holds that ended with a reset, or were published anew.",
        ),
        *_rows("bytes", "counter", ("direction",), handoffs_claimed_bytes="Bytes of blocks that claims were granted."),
        *_rows(
            "seconds",
            "counter",
            ("direction",),
            handoffs_held_seconds="For how long the holds that have ended kept their blocks from eviction, added up.",
        ),
        *_rows(
            "claims",
            "counter",
            ("outcome",),
            handoffs_claims_missed="Claims that did not find their hold, by what they met.",
        ),
    ),
}
"""The metrics, by what they are about."""

METRICS: dict[str, Row] = {row.name: row for rows in ROOMS.values() for row in rows}
"""All metrics by name."""
