"""The five screens: fleet, node, tier, tenant, handoff."""

from __future__ import annotations

from .kit import Figure, Lines, Query, Screen, Sheet

__all__ = ["SCREENS"]

_TIER = ("tier", "Tier", "kvtier_tier_info")
_TENANT = ("tenant", "Tenant", "kvtier_tenant_used_bytes")


def _hit_ratio(by: str = "") -> str:
    """Returns the part of the looked-up keys that some tier had, per value of these labels."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate(kvtier_tier_hits_total[])) / sum{group} (rate(kvtier_lookup_keys_total[]))"


def _fill(by: str, labels: str) -> str:
    """Returns which part of their capacity these tiers use."""
    used, capacity = (f"sum by ({by}) (kvtier_tier_{name}_bytes[{labels}])" for name in ("used", "capacity"))
    return f"{used} / {capacity}"


def _quantile(quantile: float, histogram: str, by: str, labels: str = "") -> str:
    return f"histogram_quantile({quantile}, sum by (le, {by}) (rate({histogram}_bucket[{labels}])))"


FLEET = Screen(
    "kvtier-fleet",
    "kvtier / fleet",
    "All servers: are they there, are they well, do they help.",
    [
        (
            "At a glance",
            [
                Figure(
                    "Servers up", "Scrape targets that answer.", "short", Query('sum(up{job=~"$job"})'), 1, good="high"
                ),
                Figure(
                    "Alerts firing",
                    "Of kvtier's own rules; docs/troubleshooting.md says what each means.",
                    "short",
                    Query('count(ALERTS{alertname=~"Kvtier.+",alertstate="firing"}) or vector(0)'),
                    1,
                ),
                Figure(
                    "Tiers in trouble",
                    "A server goes on without such a tier; `kvtier status` says what is wrong.",
                    "short",
                    Query("count(kvtier_tier_healthy[]) - sum(kvtier_tier_healthy[])"),
                    1,
                ),
                Figure("Sessions", "Engine processes that are connected.", "short", Query("sum(kvtier_sessions[])")),
                Figure(
                    "Hit ratio",
                    "Looked-up keys that some tier had, of all servers.",
                    "percentunit",
                    Query(_hit_ratio()),
                ),
                Figure("Bytes held", "In all tiers of all servers.", "bytes", Query("sum(kvtier_tier_used_bytes[])")),
            ],
        ),
        (
            "Do they help",
            [
                Lines(
                    "Hit ratio per server",
                    "A server that is far below the others lacks memory, or gets other requests than they do.",
                    "percentunit",
                    [Query(_hit_ratio("instance"), "{{instance}}")],
                    most=1,
                ),
                Lines(
                    "Keys looked up, by what they met",
                    "A tier that had them, or `miss`. Together these are all keys that were asked for.",
                    "cps",
                    [
                        Query("sum by (tier) (rate(kvtier_tier_hits_total[]))", "{{tier}}"),
                        Query("sum(rate(kvtier_lookup_misses_total[]))", "miss"),
                    ],
                    stacked=True,
                ),
                Lines(
                    "Misses by reason",
                    "docs/troubleshooting.md#misses-by-reason explains each reason and what to do.",
                    "cps",
                    [Query("sum by (reason) (rate(kvtier_lookup_misses_total[]))", "{{reason}}")],
                    stacked=True,
                ),
                Lines(
                    "Estimated hit ratio with more memory, or less",
                    "Keys that the CPU tier would answer with so many times its size: what more would buy. Averaged over servers.",
                    "percentunit",
                    [Query('avg by (scale) (kvtier_estimated_hit_ratio[tier="cpu"])', "{{scale}} times")],
                    most=1,
                ),
            ],
        ),
        (
            "Are they well",
            [
                Lines(
                    "Event-loop lag, p99",
                    "What every call waits at least. Above 0.1 s the loop is busy, or the machine is.",
                    "s",
                    [Query(_quantile(0.99, "kvtier_loop_lag_seconds", "instance"), "{{instance}}")],
                ),
                Lines(
                    "Refused calls by reason",
                    "STALE_EPOCH and UNKNOWN_SESSION follow a restart and end by themselves.",
                    "reqps",
                    [
                        Query(
                            "sum by (reason) (rate(kvtier_refusals_total[])) > 0 or sum(rate(kvtier_refusals_total[]))",
                            "{{reason}}",
                        )
                    ],
                    stacked=True,
                ),
                Sheet(
                    "Servers",
                    "One line each.",
                    ["instance"],
                    [
                        ("up for", "s", "max by (instance) (kvtier_uptime_seconds[])"),
                        ("sessions", "short", "sum by (instance) (kvtier_sessions[])"),
                        (
                            "memory used",
                            "percentunit",
                            _fill("instance", 'tier="cpu"'),
                        ),
                        ("hit ratio", "percentunit", _hit_ratio("instance")),
                        ("quarantine", "bytes", "sum by (instance) (kvtier_quarantined_bytes[])"),
                        ("tiers in trouble", "short", "sum by (instance) (1 - kvtier_tier_healthy[])"),
                    ],
                ),
                Sheet(
                    "Versions",
                    "Servers by version.",
                    ["version", "python"],
                    [("servers", "short", "count by (version, python) (kvtier_build_info[])")],
                ),
            ],
        ),
    ],
)

NODE = Screen(
    "kvtier-node",
    "kvtier / node",
    "One server: its calls, its loop, its memory, who is connected.",
    [
        (
            "At a glance",
            [
                Figure("Up for", "Since it was ready.", "s", Query("max(kvtier_uptime_seconds[])")),
                Figure("Sessions", "Engine processes that are connected.", "short", Query("sum(kvtier_sessions[])")),
                Figure("Leases", "Reads that pin blocks.", "short", Query("sum(kvtier_leases[])")),
                Figure("Stores in flight", "Writes that have slots.", "short", Query("sum(kvtier_stores[])")),
                Figure(
                    "Quarantine",
                    "Memory that a process which lost its store may still write to.",
                    "bytes",
                    Query("sum(kvtier_quarantined_bytes[])"),
                    1,
                ),
                Figure(
                    "Region backed",
                    "What of the region has memory behind it. Less than all, minutes after a start: there was too little.",
                    "percentunit",
                    Query("sum(kvtier_region_backed_bytes[]) / sum(kvtier_region_bytes[])"),
                    0.999,
                    good="high",
                ),
            ],
        ),
        (
            "Calls",
            [
                Lines(
                    "Calls by method",
                    "All that ended, streams included.",
                    "reqps",
                    [Query("sum by (method) (rate(kvtier_rpc_duration_seconds_count[]))", "{{method}}")],
                    stacked=True,
                ),
                Lines(
                    "Duration of lookups, stores and loads",
                    "As the server measures them; a lookup may wait for what is fetched from a tier below.",
                    "s",
                    [
                        Query(
                            _quantile(quantile, "kvtier_rpc_duration_seconds", "method", 'method=~"CacheService/.+"'),
                            f"p{round(quantile * 100)} {{{{method}}}}",
                        )
                        for quantile in (0.5, 0.99)
                    ],
                ),
                Lines(
                    "Refused calls",
                    "By service and reason (docs/troubleshooting.md).",
                    "reqps",
                    [
                        Query(
                            "sum by (service, reason) (rate(kvtier_refusals_total[])) > 0"
                            " or sum(rate(kvtier_refusals_total[]))",
                            "{{service}} {{reason}}",
                        )
                    ],
                ),
                Lines(
                    "Event-loop lag",
                    "How late the loop wakes up: what every call waits at least.",
                    "s",
                    [
                        Query(_quantile(quantile, "kvtier_loop_lag_seconds", "instance"), f"p{round(quantile * 100)}")
                        for quantile in (0.5, 0.99)
                    ],
                ),
            ],
        ),
        (
            "Who is connected",
            [
                Lines(
                    "Sessions by transport",
                    "`shm` copies straight into the shared memory.",
                    "short",
                    [Query("sum by (transport) (kvtier_sessions[])", "{{transport}}")],
                    stacked=True,
                ),
                Lines(
                    "Sessions opened and closed",
                    "Both high: engines come and go, or lose their connection.",
                    "cps",
                    [
                        Query("sum(rate(kvtier_sessions_opened_total[]))", "opened"),
                        Query("sum(rate(kvtier_sessions_closed_total[]))", "closed"),
                    ],
                ),
                Lines(
                    "Bytes over networks",
                    "Those of engines that have the memory mapped are not seen here.",
                    "Bps",
                    [
                        Query(
                            "sum by (transport, direction) (rate(kvtier_transfer_bytes_total[]))",
                            "{{transport}} {{direction}}",
                        )
                    ],
                ),
                Lines(
                    "Age of the oldest lease, and leases that nobody gave back",
                    "Leases that expire are a leak in an engine, or an engine that died.",
                    "short",
                    [
                        Query("max(kvtier_oldest_lease_seconds[])", "oldest, s"),
                        Query("sum(rate(kvtier_leases_expired_total[]))", "leases expired/s"),
                        Query("sum(rate(kvtier_stores_expired_total[]))", "stores expired/s"),
                    ],
                ),
            ],
        ),
        (
            "The process",
            [
                Lines(
                    "Memory",
                    "Resident includes the shared region.",
                    "bytes",
                    [
                        Query("sum(process_resident_memory_bytes[])", "resident"),
                        Query("sum(kvtier_region_backed_bytes[])", "region"),
                    ],
                    width=8,
                ),
                Lines("CPU", "Cores.", "short", [Query("sum(rate(process_cpu_seconds_total[]))", "cores")], width=8),
                Lines(
                    "Descriptors",
                    "Open files and connections, of as many as may be.",
                    "percentunit",
                    [Query("sum(process_open_fds[]) / sum(process_max_fds[])", "open")],
                    width=8,
                ),
            ],
        ),
    ],
    one_server=True,
)

TIER = Screen(
    "kvtier-tier",
    "kvtier / tier",
    "Where blocks are, how fast they move, why they go.",
    [
        (
            "At a glance",
            [
                Figure("Used", "By all chosen tiers.", "bytes", Query('sum(kvtier_tier_used_bytes[tier=~"$tier"])')),
                Figure("Blocks", "Held by them.", "short", Query('sum(kvtier_tier_blocks[tier=~"$tier"])')),
                Figure(
                    "In trouble",
                    "Tiers that the server goes on without.",
                    "short",
                    Query('sum(1 - kvtier_tier_healthy[tier=~"$tier"])'),
                    1,
                ),
                Figure(
                    "Waiting to be stored",
                    "Pinned in memory meanwhile.",
                    "bytes",
                    Query('sum(kvtier_tier_queued_bytes[tier=~"$tier"])'),
                ),
                Figure(
                    "Damaged blocks",
                    "Found by loads and checks since the start; none was served.",
                    "short",
                    Query('sum(kvtier_tier_damaged_total[tier=~"$tier"])'),
                    1,
                ),
                Figure(
                    "Checksum mismatches",
                    "Bytes that were not what had been written.",
                    "short",
                    Query("sum(kvtier_checksum_mismatches_total[])"),
                    1,
                ),
            ],
        ),
        (
            "What is there",
            [
                Lines(
                    "Fill",
                    "A full tier is as it should be, if what it evicts is not missed.",
                    "percentunit",
                    [Query(_fill("tier", 'tier=~"$tier"'), "{{tier}}")],
                    most=1,
                ),
                Lines(
                    "Hit ratio of each tier",
                    "Of the keys that it was asked for, which are those that the tiers before it did not have.",
                    "percentunit",
                    [
                        Query(
                            'sum by (tier) (rate(kvtier_tier_hits_total[tier=~"$tier"]))'
                            ' / (sum by (tier) (rate(kvtier_tier_hits_total[tier=~"$tier"]))'
                            ' + sum by (tier) (rate(kvtier_tier_misses_total[tier=~"$tier"])))',
                            "{{tier}}",
                        )
                    ],
                    most=1,
                ),
                Lines(
                    "Estimated hit ratio with more room, or less",
                    "Keys that the tier, or one above it, would answer with so many times its size.",
                    "percentunit",
                    [
                        Query(
                            'avg by (tier, scale) (kvtier_estimated_hit_ratio[tier=~"$tier"])',
                            "{{tier}} {{scale}} times",
                        )
                    ],
                    most=1,
                ),
                Lines(
                    "Keys found and not found",
                    "A key that one tier lacks is looked for in the next.",
                    "cps",
                    [
                        Query('sum by (tier) (rate(kvtier_tier_hits_total[tier=~"$tier"]))', "{{tier}} found"),
                        Query('sum by (tier) (rate(kvtier_tier_misses_total[tier=~"$tier"]))', "{{tier}} not found"),
                    ],
                ),
            ],
        ),
        (
            "What goes, and what never came",
            [
                Lines(
                    "Evictions",
                    "Blocks that made room.",
                    "cps",
                    [Query('sum by (tier) (rate(kvtier_tier_evictions_total[tier=~"$tier"]))', "{{tier}}")],
                ),
                Lines(
                    "Left out",
                    "Dropped: queue or tier full. Declined: `admission`. Expired: `ttl`. Not retained: beyond the bounds.",
                    "cps",
                    [
                        Query(
                            f'sum by (tier) (rate(kvtier_tier_{name}_total[tier=~"$tier"]))',
                            "{{tier}} " + name.replace("_", " "),
                        )
                        for name in ("dropped", "declined", "expired", "not_retained")
                    ],
                ),
            ],
        ),
        (
            "How it moves",
            [
                Lines(
                    "Bytes stored and loaded",
                    "By jobs, between memory and the tier.",
                    "Bps",
                    [
                        Query(
                            'sum by (tier, operation) (rate(kvtier_tier_job_bytes_total[tier=~"$tier"]))',
                            "{{tier}} {{operation}}",
                        )
                    ],
                ),
                Lines(
                    "Duration of jobs",
                    "A job is up to 32 MiB. The wait before it is not included.",
                    "s",
                    [
                        Query(
                            _quantile(quantile, "kvtier_tier_job_duration_seconds", "tier, operation", 'tier=~"$tier"'),
                            f"p{round(quantile * 100)} {{{{tier}}}} {{{{operation}}}}",
                        )
                        for quantile in (0.5, 0.99)
                    ],
                ),
                Lines(
                    "Queue",
                    "Bytes that wait to be stored, or are being stored. At a quarter of the region more is dropped.",
                    "bytes",
                    [Query('sum by (tier) (kvtier_tier_queued_bytes[tier=~"$tier"])', "{{tier}}")],
                ),
                Lines(
                    "Blocks of jobs, by what became of them",
                    "Other than `done`: the tier failed, or lacked the block, or had it damaged.",
                    "cps",
                    [
                        Query(
                            'sum by (tier, operation, outcome) (rate(kvtier_tier_job_blocks_total[tier=~"$tier"]))',
                            "{{tier}} {{operation}} {{outcome}}",
                        )
                    ],
                ),
            ],
        ),
    ],
    [_TIER],
)

TENANT = Screen(
    "kvtier-tenant",
    "kvtier / tenant",
    "Who has what, who gets what: shares of the tiers, hits and misses.",
    [
        (
            "Shares",
            [
                Lines(
                    "Used",
                    'Per tier. The tenant "" is all who have no share of their own.',
                    "bytes",
                    [
                        Query(
                            'sum by (tenant, tier) (kvtier_tenant_used_bytes[tenant=~"$tenant"])', "{{tier}} {{tenant}}"
                        )
                    ],
                    stacked=True,
                ),
                Lines(
                    "Used, as a part of the quota",
                    "Above 1 it uses what nobody else wants at the moment.",
                    "percentunit",
                    [
                        Query(
                            'sum by (tenant, tier) (kvtier_tenant_used_bytes[tenant=~"$tenant"])'
                            ' / (sum by (tenant, tier) (kvtier_tenant_quota_bytes[tenant=~"$tenant"]) > 0)',
                            "{{tier}} {{tenant}}",
                        )
                    ],
                ),
                Lines(
                    "Used, as a part of the limit",
                    "At 1 its own blocks make room for its next ones. Tenants without a limit are not shown.",
                    "percentunit",
                    [
                        Query(
                            'sum by (tenant, tier) (kvtier_tenant_used_bytes[tenant=~"$tenant"])'
                            ' / sum by (tenant, tier) (kvtier_tenant_limit_bytes[tenant=~"$tenant"])',
                            "{{tier}} {{tenant}}",
                        )
                    ],
                    most=1,
                ),
                Lines(
                    "Retained",
                    "What may not be evicted for a while.",
                    "bytes",
                    [
                        Query(
                            'sum by (tenant, tier) (kvtier_tenant_retained_bytes[tenant=~"$tenant"])',
                            "{{tier}} {{tenant}}",
                        )
                    ],
                ),
            ],
        ),
        (
            "Hits and misses",
            [
                Lines(
                    "Hit ratio",
                    "Of the keys that each tenant looked up.",
                    "percentunit",
                    [
                        Query(
                            'sum by (tenant) (rate(kvtier_namespace_hits_total[tenant=~"$tenant"])) / (sum by (tenant)'
                            ' (rate(kvtier_namespace_hits_total[tenant=~"$tenant"]))'
                            ' + sum by (tenant) (rate(kvtier_namespace_misses_total[tenant=~"$tenant"])))',
                            "{{tenant}}",
                        )
                    ],
                    most=1,
                ),
                Lines(
                    "Misses by reason",
                    "`evicted`: more room, or a quota, would have helped.",
                    "cps",
                    [
                        Query(
                            'sum by (tenant, reason) (rate(kvtier_namespace_misses_total[tenant=~"$tenant"]))',
                            "{{tenant}} {{reason}}",
                        )
                    ],
                    stacked=True,
                ),
            ],
        ),
        (
            "Namespaces",
            [
                Sheet(
                    "Namespaces",
                    "All that must agree for bytes to mean the same: a model with its format. `other` is what is not told apart.",
                    ["namespace", "tenant"],
                    [
                        ("blocks", "short", 'sum by (namespace, tenant) (kvtier_namespace_blocks[tenant=~"$tenant"])'),
                        (
                            "hits per second",
                            "cps",
                            'sum by (namespace, tenant) (rate(kvtier_namespace_hits_total[tenant=~"$tenant"]))',
                        ),
                        (
                            "misses per second",
                            "cps",
                            'sum by (namespace, tenant) (rate(kvtier_namespace_misses_total[tenant=~"$tenant"]))',
                        ),
                    ],
                    width=14,
                ),
                Sheet(
                    "Models",
                    "Of the engines of each namespace.",
                    ["namespace", "model"],
                    [("servers", "short", 'count by (namespace, model) (kvtier_namespace_info[tenant=~"$tenant"])')],
                    width=10,
                ),
            ],
        ),
    ],
    [_TENANT],
)

HANDOFF = Screen(
    "kvtier-handoff",
    "kvtier / handoff",
    "Requests that engines hand to each other: prefill to decode, and back on the next turn.",
    [
        (
            "At a glance",
            [
                Figure("Held now", "Requests.", "short", Query("sum(kvtier_holds[])"), width=6),
                Figure("Pinned by holds", "Memory.", "bytes", Query("sum(kvtier_held_bytes[])"), width=6),
                Figure(
                    "Pinned, as a part of the memory",
                    "Bounded by `handoff.part`, a quarter if nothing is said.",
                    "percentunit",
                    Query("sum(kvtier_held_bytes[]) / sum(kvtier_region_bytes[])"),
                    width=6,
                ),
                Figure(
                    "Claims that found nothing",
                    "Per second.",
                    "cps",
                    Query("sum(rate(kvtier_handoffs_claims_missed_total[]))"),
                    width=6,
                ),
            ],
        ),
        (
            "What becomes of them",
            [
                Lines(
                    "Published and declined",
                    "Declined: too little memory for so many conversations. Raise `handoff.part`, or hold for shorter.",
                    "cps",
                    [
                        Query(
                            "sum by (direction) (rate(kvtier_handoffs_published_total[]))", "published {{direction}}"
                        ),
                        Query("sum by (direction) (rate(kvtier_handoffs_declined_total[]))", "declined {{direction}}"),
                    ],
                ),
                Lines(
                    "How they end",
                    "Expired as often as published: nobody claims what is held.",
                    "cps",
                    [
                        Query(f"sum by (direction) (rate(kvtier_handoffs_{name}_total[]))", name + " {{direction}}")
                        for name in ("claimed", "released", "expired", "dropped")
                    ],
                ),
                Lines(
                    "Claims that found nothing, by what they met",
                    "`other_namespace`: prefill and decode engines whose blocks do not mean the same.",
                    "cps",
                    [Query("sum by (outcome) (rate(kvtier_handoffs_claims_missed_total[]))", "{{outcome}}")],
                    stacked=True,
                ),
                Lines(
                    "Bytes claimed",
                    "Of blocks that claims were granted.",
                    "Bps",
                    [Query("sum by (direction) (rate(kvtier_handoffs_claimed_bytes_total[]))", "{{direction}}")],
                ),
                Lines(
                    "For how long requests are held",
                    "On average, of those that ended.",
                    "s",
                    [
                        Query(
                            "sum by (direction) (rate(kvtier_handoffs_held_seconds_total[])) / (sum by (direction)"
                            " (rate(kvtier_handoffs_released_total[])) + sum by (direction) (rate(kvtier_handoffs_expired_total[]))"
                            " + sum by (direction) (rate(kvtier_handoffs_dropped_total[])))",
                            "{{direction}}",
                        )
                    ],
                ),
                Lines(
                    "Held now",
                    "Requests.",
                    "short",
                    [Query("sum by (direction) (kvtier_holds[])", "{{direction}}")],
                    stacked=True,
                ),
            ],
        ),
    ],
)

SCREENS = (FLEET, NODE, TIER, TENANT, HANDOFF)
