"""Definitions of the dashboards fleet, node, tier, tenant and handoff."""

from __future__ import annotations

from .panels import DashboardSpec, Query, Stat, Table, TimeSeries

__all__ = ["DASHBOARDS", "fill", "hit_ratio", "quantile"]

_TIER = ("tier", "Tier", "kvtier_tier_info")
_TENANT = ("tenant", "Tenant", "kvtier_tenant_used_bytes")


def hit_ratio(by: str = "") -> str:
    """Returns the expression of the hit ratio of all tiers, grouped by these labels."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate(kvtier_tier_hits_total[])) / sum{group} (rate(kvtier_lookup_keys_total[]))"


def fill(by: str, labels: str) -> str:
    """Returns the expression of used capacity as a ratio, for the tiers with these labels."""
    used, capacity = (f"sum by ({by}) (kvtier_tier_{name}_bytes[{labels}])" for name in ("used", "capacity"))
    return f"{used} / {capacity}"


def quantile(share: float, histogram: str, by: str, labels: str = "") -> str:
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({histogram}_bucket[{labels}])))"


FLEET = DashboardSpec(
    "kvtier-fleet",
    "kvtier / fleet",
    "All servers: availability, health and hit ratio.",
    [
        (
            "At a glance",
            [
                Stat(
                    "Servers up", "Scrape targets that answer.", "short", Query('sum(up{job=~"$job"})'), 1, good="high"
                ),
                Stat(
                    "Alerts firing",
                    "Alerts of kvtier's rules. docs/troubleshooting.md explains each.",
                    "short",
                    Query('count(ALERTS{alertname=~"Kvtier.+",alertstate="firing"}) or vector(0)'),
                    1,
                ),
                Stat(
                    "Tiers in trouble",
                    "The server goes on without such a tier. `kvtier status` shows the cause.",
                    "short",
                    Query("count(kvtier_tier_healthy[]) - sum(kvtier_tier_healthy[])"),
                    1,
                ),
                Stat("Sessions", "Connected engine processes.", "short", Query("sum(kvtier_sessions[])")),
                Stat(
                    "Hit ratio",
                    "Share of looked-up keys that a tier had, over all servers.",
                    "percentunit",
                    Query(hit_ratio()),
                ),
                Stat(
                    "Bytes held", "Bytes in all tiers of all servers.", "bytes", Query("sum(kvtier_tier_used_bytes[])")
                ),
            ],
        ),
        (
            "Hits",
            [
                TimeSeries(
                    "Hit ratio per server",
                    "A server far below the others lacks memory, or gets different requests.",
                    "percentunit",
                    [Query(hit_ratio("instance"), "{{instance}}")],
                    max_value=1,
                ),
                TimeSeries(
                    "Keys looked up, by result",
                    "The tier that had the key, or `miss`. The sum is all looked-up keys.",
                    "cps",
                    [
                        Query("sum by (tier) (rate(kvtier_tier_hits_total[]))", "{{tier}}"),
                        Query("sum(rate(kvtier_lookup_misses_total[]))", "miss"),
                    ],
                    stacked=True,
                ),
                TimeSeries(
                    "Misses by reason",
                    "docs/troubleshooting.md#misses-by-reason explains each reason and what to do.",
                    "cps",
                    [Query("sum by (reason) (rate(kvtier_lookup_misses_total[]))", "{{reason}}")],
                    stacked=True,
                ),
                TimeSeries(
                    "Estimated hit ratio for other memory sizes",
                    "Hit ratio that the CPU tier would have with a multiple of its size. Average of the servers.",
                    "percentunit",
                    [Query('avg by (scale) (kvtier_estimated_hit_ratio[tier="cpu"])', "{{scale}} times")],
                    max_value=1,
                ),
            ],
        ),
        (
            "Health",
            [
                TimeSeries(
                    "Event-loop lag, p99",
                    "Minimum wait of every call. Above 0.1 s the event loop or the machine is overloaded.",
                    "s",
                    [Query(quantile(0.99, "kvtier_loop_lag_seconds", "instance"), "{{instance}}")],
                ),
                TimeSeries(
                    "Refused calls by reason",
                    "STALE_EPOCH and UNKNOWN_SESSION follow a restart and stop by themselves.",
                    "reqps",
                    [
                        Query(
                            "sum by (reason) (rate(kvtier_refusals_total[])) > 0 or sum(rate(kvtier_refusals_total[]))",
                            "{{reason}}",
                        )
                    ],
                    stacked=True,
                ),
                Table(
                    "Servers",
                    "One row per server.",
                    ["instance"],
                    [
                        ("up for", "s", "max by (instance) (kvtier_uptime_seconds[])"),
                        ("sessions", "short", "sum by (instance) (kvtier_sessions[])"),
                        (
                            "memory used",
                            "percentunit",
                            fill("instance", 'tier="cpu"'),
                        ),
                        ("hit ratio", "percentunit", hit_ratio("instance")),
                        ("quarantine", "bytes", "sum by (instance) (kvtier_quarantined_bytes[])"),
                        ("tiers in trouble", "short", "sum by (instance) (1 - kvtier_tier_healthy[])"),
                        ("downgrades", "short", "sum by (instance) (kvtier_downgrades[])"),
                    ],
                ),
                Table(
                    "Versions",
                    "Servers by version.",
                    ["version", "python"],
                    [("servers", "short", "count by (version, python) (kvtier_build_info[])")],
                ),
            ],
        ),
    ],
)

NODE = DashboardSpec(
    "kvtier-node",
    "kvtier / node",
    "One server: calls, event loop, memory, sessions.",
    [
        (
            "At a glance",
            [
                Stat("Up for", "Time since the server was ready.", "s", Query("max(kvtier_uptime_seconds[])")),
                Stat("Sessions", "Connected engine processes.", "short", Query("sum(kvtier_sessions[])")),
                Stat("Leases", "Leases that pin blocks for reading.", "short", Query("sum(kvtier_leases[])")),
                Stat("Stores in flight", "Writes that hold slots.", "short", Query("sum(kvtier_stores[])")),
                Stat(
                    "Quarantine",
                    "Memory to which a process that lost its store may still write.",
                    "bytes",
                    Query("sum(kvtier_quarantined_bytes[])"),
                    1,
                ),
                Stat(
                    "Region backed",
                    "Backed share of the region. Below 100 % minutes after a start: there was too little memory.",
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
                TimeSeries(
                    "Calls by method",
                    "Completed calls, streams included.",
                    "reqps",
                    [Query("sum by (method) (rate(kvtier_rpc_duration_seconds_count[]))", "{{method}}")],
                    stacked=True,
                ),
                TimeSeries(
                    "Duration of lookups, stores and loads",
                    "Measured by the server. A lookup may wait for blocks from a lower tier.",
                    "s",
                    [
                        Query(
                            quantile(share, "kvtier_rpc_duration_seconds", "method", 'method=~"CacheService/.+"'),
                            f"p{round(share * 100)} {{{{method}}}}",
                        )
                        for share in (0.5, 0.99)
                    ],
                ),
                TimeSeries(
                    "Refused calls",
                    "By service and reason. docs/troubleshooting.md explains the reasons.",
                    "reqps",
                    [
                        Query(
                            "sum by (service, reason) (rate(kvtier_refusals_total[])) > 0"
                            " or sum(rate(kvtier_refusals_total[]))",
                            "{{service}} {{reason}}",
                        )
                    ],
                ),
                TimeSeries(
                    "Event-loop lag",
                    "How late the event loop wakes up: the minimum wait of every call.",
                    "s",
                    [
                        Query(quantile(share, "kvtier_loop_lag_seconds", "instance"), f"p{round(share * 100)}")
                        for share in (0.5, 0.99)
                    ],
                ),
            ],
        ),
        (
            "Sessions",
            [
                TimeSeries(
                    "Sessions by transport",
                    "`shm` copies directly into shared memory.",
                    "short",
                    [Query("sum by (transport) (kvtier_sessions[])", "{{transport}}")],
                    stacked=True,
                ),
                TimeSeries(
                    "Sessions opened and closed",
                    "If both are high, engines start and stop often, or lose their connection.",
                    "cps",
                    [
                        Query("sum(rate(kvtier_sessions_opened_total[]))", "opened"),
                        Query("sum(rate(kvtier_sessions_closed_total[]))", "closed"),
                    ],
                ),
                TimeSeries(
                    "Bytes over networks",
                    "Bytes moved in streams. Copies in shared memory are not counted.",
                    "Bps",
                    [
                        Query(
                            "sum by (transport, direction) (rate(kvtier_transfer_bytes_total[]))",
                            "{{transport}} {{direction}}",
                        )
                    ],
                ),
                TimeSeries(
                    "Age of the oldest lease, and expired leases and stores",
                    "Expired leases come from an engine that leaks them or died.",
                    "short",
                    [
                        Query("max(kvtier_oldest_lease_seconds[])", "oldest, s"),
                        Query("sum(rate(kvtier_leases_expired_total[]))", "leases expired/s"),
                        Query("sum(rate(kvtier_stores_expired_total[]))", "stores expired/s"),
                    ],
                ),
                TimeSeries(
                    "Lookups that wait for room",
                    "Lookups that wait because leases and stores pin the CPU tier. Raise region_size if many wait.",
                    "short",
                    [
                        Query("sum(kvtier_room_waiting[])", "waiting"),
                        Query("sum(rate(kvtier_room_waits_total[]))", "begun/s"),
                    ],
                ),
                TimeSeries(
                    "Waits for room",
                    "Average duration of the waits for room.",
                    "s",
                    [
                        Query(
                            "sum(rate(kvtier_room_waited_seconds_total[])) / sum(rate(kvtier_room_waits_total[]))",
                            "average",
                        )
                    ],
                ),
            ],
        ),
        (
            "Conversations",
            [
                TimeSeries(
                    "Conversations",
                    "Conversations that engines have named. docs/agents.md explains them.",
                    "short",
                    [Query("sum(kvtier_conversations[])", "conversations")],
                    width=8,
                ),
                TimeSeries(
                    "Keys of conversations",
                    "Recorded keys. At the limits in docs/agents.md the server forgets the oldest conversations.",
                    "short",
                    [Query("sum(kvtier_conversation_keys[])", "keys")],
                    width=8,
                ),
                TimeSeries(
                    "Forgotten conversations",
                    "Hints about these conversations are refused. Their blocks stay.",
                    "cps",
                    [Query("sum(rate(kvtier_conversations_forgotten_total[]))", "forgotten")],
                    width=8,
                ),
            ],
        ),
        (
            "Process",
            [
                TimeSeries(
                    "Memory",
                    "Resident memory includes the shared region.",
                    "bytes",
                    [
                        Query("sum(process_resident_memory_bytes[])", "resident"),
                        Query("sum(kvtier_region_backed_bytes[])", "region"),
                    ],
                    width=8,
                ),
                TimeSeries(
                    "CPU", "Cores in use.", "short", [Query("sum(rate(process_cpu_seconds_total[]))", "cores")], width=8
                ),
                TimeSeries(
                    "Descriptors",
                    "Open files and connections, as a share of the limit.",
                    "percentunit",
                    [Query("sum(process_open_fds[]) / sum(process_max_fds[])", "open")],
                    width=8,
                ),
            ],
        ),
    ],
    single_server=True,
)

TIER = DashboardSpec(
    "kvtier-tier",
    "kvtier / tier",
    "Contents of the tiers, evictions and transfers.",
    [
        (
            "At a glance",
            [
                Stat(
                    "Used", "Bytes in the selected tiers.", "bytes", Query('sum(kvtier_tier_used_bytes[tier=~"$tier"])')
                ),
                Stat(
                    "Blocks", "Blocks in the selected tiers.", "short", Query('sum(kvtier_tier_blocks[tier=~"$tier"])')
                ),
                Stat(
                    "In trouble",
                    "Tiers that the server works without.",
                    "short",
                    Query('sum(1 - kvtier_tier_healthy[tier=~"$tier"])'),
                    1,
                ),
                Stat(
                    "Waiting to be stored",
                    "These bytes are pinned in memory.",
                    "bytes",
                    Query('sum(kvtier_tier_queued_bytes[tier=~"$tier"])'),
                ),
                Stat(
                    "Damaged blocks",
                    "Found by loads and checks since the start. None was served.",
                    "short",
                    Query('sum(kvtier_tier_damaged_total[tier=~"$tier"])'),
                    1,
                ),
                Stat(
                    "Checksum mismatches",
                    "Bytes differed from what was written.",
                    "short",
                    Query("sum(kvtier_checksum_mismatches_total[])"),
                    1,
                ),
                Stat(
                    "Wrong blocks",
                    "Whole blocks that differ from the KV that an engine computes.",
                    "short",
                    Query("sum(kvtier_wrong_blocks_total[])"),
                    1,
                ),
            ],
        ),
        (
            "Contents",
            [
                TimeSeries(
                    "Fill",
                    "A full tier is normal as long as evicted blocks are not requested again.",
                    "percentunit",
                    [Query(fill("tier", 'tier=~"$tier"'), "{{tier}}")],
                    max_value=1,
                ),
                TimeSeries(
                    "Hit ratio of each tier",
                    "Share of the keys that reached this tier, because the tiers above lacked them.",
                    "percentunit",
                    [
                        Query(
                            'sum by (tier) (rate(kvtier_tier_hits_total[tier=~"$tier"]))'
                            ' / (sum by (tier) (rate(kvtier_tier_hits_total[tier=~"$tier"]))'
                            ' + sum by (tier) (rate(kvtier_tier_misses_total[tier=~"$tier"])))',
                            "{{tier}}",
                        )
                    ],
                    max_value=1,
                ),
                TimeSeries(
                    "Estimated hit ratio for other sizes",
                    "Share of keys that the tier, or one above it, would serve with a multiple of its size.",
                    "percentunit",
                    [
                        Query(
                            'avg by (tier, scale) (kvtier_estimated_hit_ratio[tier=~"$tier"])',
                            "{{tier}} {{scale}} times",
                        )
                    ],
                    max_value=1,
                ),
                TimeSeries(
                    "Keys found and not found",
                    "If a tier lacks a key, the next tier is asked.",
                    "cps",
                    [
                        Query('sum by (tier) (rate(kvtier_tier_hits_total[tier=~"$tier"]))', "{{tier}} found"),
                        Query('sum by (tier) (rate(kvtier_tier_misses_total[tier=~"$tier"]))', "{{tier}} not found"),
                    ],
                ),
            ],
        ),
        (
            "Evicted and rejected blocks",
            [
                TimeSeries(
                    "Evictions",
                    "Blocks evicted to make room.",
                    "cps",
                    [Query('sum by (tier) (rate(kvtier_tier_evictions_total[tier=~"$tier"]))', "{{tier}}")],
                ),
                TimeSeries(
                    "Rejected",
                    "Dropped: queue or tier full. Declined: by `admission`. Expired: by `ttl`. Not retained: beyond the bounds.",
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
            "Transfers",
            [
                TimeSeries(
                    "Bytes stored and loaded",
                    "Bytes of jobs between memory and the tier.",
                    "Bps",
                    [
                        Query(
                            'sum by (tier, operation) (rate(kvtier_tier_job_bytes_total[tier=~"$tier"]))',
                            "{{tier}} {{operation}}",
                        )
                    ],
                ),
                TimeSeries(
                    "Duration of jobs",
                    "A job has up to 32 MiB. The wait in the queue is not included.",
                    "s",
                    [
                        Query(
                            quantile(share, "kvtier_tier_job_duration_seconds", "tier, operation", 'tier=~"$tier"'),
                            f"p{round(share * 100)} {{{{tier}}}} {{{{operation}}}}",
                        )
                        for share in (0.5, 0.99)
                    ],
                ),
                TimeSeries(
                    "Queue",
                    "Bytes that wait to be stored or are being stored. Above a quarter of the region, blocks are dropped.",
                    "bytes",
                    [Query('sum by (tier) (kvtier_tier_queued_bytes[tier=~"$tier"])', "{{tier}}")],
                ),
                TimeSeries(
                    "Blocks of jobs, by outcome",
                    "Not `done`: the tier failed, lacked the block, or had a damaged copy.",
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

TENANT = DashboardSpec(
    "kvtier-tenant",
    "kvtier / tenant",
    "Tenants: shares of the tiers, hits and misses.",
    [
        (
            "Shares",
            [
                TimeSeries(
                    "Used",
                    'Per tier. The tenant "" is the sum of all tenants without a table.',
                    "bytes",
                    [
                        Query(
                            'sum by (tenant, tier) (kvtier_tenant_used_bytes[tenant=~"$tenant"])', "{{tier}} {{tenant}}"
                        )
                    ],
                    stacked=True,
                ),
                TimeSeries(
                    "Used share of the quota",
                    "Above 1 the tenant uses space that no other tenant needs now.",
                    "percentunit",
                    [
                        Query(
                            'sum by (tenant, tier) (kvtier_tenant_used_bytes[tenant=~"$tenant"])'
                            ' / (sum by (tenant, tier) (kvtier_tenant_quota_bytes[tenant=~"$tenant"]) > 0)',
                            "{{tier}} {{tenant}}",
                        )
                    ],
                ),
                TimeSeries(
                    "Used share of the limit",
                    "At 1 the tenant's new blocks evict its own old ones. Tenants without a limit are not shown.",
                    "percentunit",
                    [
                        Query(
                            'sum by (tenant, tier) (kvtier_tenant_used_bytes[tenant=~"$tenant"])'
                            ' / sum by (tenant, tier) (kvtier_tenant_limit_bytes[tenant=~"$tenant"])',
                            "{{tier}} {{tenant}}",
                        )
                    ],
                    max_value=1,
                ),
                TimeSeries(
                    "Retained",
                    "Bytes that requests protect from eviction for a while.",
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
                TimeSeries(
                    "Hit ratio",
                    "Share of the keys that each tenant looked up.",
                    "percentunit",
                    [
                        Query(
                            'sum by (tenant) (rate(kvtier_namespace_hits_total[tenant=~"$tenant"])) / (sum by (tenant)'
                            ' (rate(kvtier_namespace_hits_total[tenant=~"$tenant"]))'
                            ' + sum by (tenant) (rate(kvtier_namespace_misses_total[tenant=~"$tenant"])))',
                            "{{tenant}}",
                        )
                    ],
                    max_value=1,
                ),
                TimeSeries(
                    "Misses by reason",
                    "`evicted`: more space or a quota would help.",
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
                Table(
                    "Namespaces",
                    "A namespace is a model with its format. `other` is the sum of the namespaces that are not listed.",
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
                Table(
                    "Models",
                    "Models of the engines in each namespace.",
                    ["namespace", "model"],
                    [("servers", "short", 'count by (namespace, model) (kvtier_namespace_info[tenant=~"$tenant"])')],
                    width=10,
                ),
            ],
        ),
    ],
    [_TENANT],
)

HANDOFF = DashboardSpec(
    "kvtier-handoff",
    "kvtier / handoff",
    "Requests handed from prefill to decode engines, and back on the next turn.",
    [
        (
            "At a glance",
            [
                Stat("Held now", "Held requests.", "short", Query("sum(kvtier_holds[])"), width=6),
                Stat("Pinned by holds", "Memory that holds pin.", "bytes", Query("sum(kvtier_held_bytes[])"), width=6),
                Stat(
                    "Pinned share of the memory",
                    "Bounded by `handoff.part`; the default is a quarter.",
                    "percentunit",
                    Query("sum(kvtier_held_bytes[]) / sum(kvtier_region_bytes[])"),
                    width=6,
                ),
                Stat(
                    "Failed claims",
                    "Requests per second that were computed instead of pulled.",
                    "cps",
                    Query("sum(rate(kvtier_handoffs_claims_missed_total[]))"),
                    width=6,
                ),
            ],
        ),
        (
            "Outcomes",
            [
                TimeSeries(
                    "Published and declined",
                    "Declined: too little memory for the number of conversations. Raise `handoff.part`, or shorten the holds.",
                    "cps",
                    [
                        Query(
                            "sum by (direction) (rate(kvtier_handoffs_published_total[]))", "published {{direction}}"
                        ),
                        Query("sum by (direction) (rate(kvtier_handoffs_declined_total[]))", "declined {{direction}}"),
                    ],
                ),
                TimeSeries(
                    "Ends of holds",
                    "If expired equals published, no engine claims the holds.",
                    "cps",
                    [
                        Query(f"sum by (direction) (rate(kvtier_handoffs_{name}_total[]))", name + " {{direction}}")
                        for name in ("claimed", "released", "expired", "dropped")
                    ],
                ),
                TimeSeries(
                    "Failed claims by outcome",
                    "`other_namespace`, `peer_not_listed`, `nothing_held`: hand-offs cannot succeed with these settings.",
                    "cps",
                    [Query("sum by (outcome) (rate(kvtier_handoffs_claims_missed_total[]))", "{{outcome}}")],
                    stacked=True,
                ),
                TimeSeries(
                    "Bytes claimed",
                    "Bytes of blocks granted to claims.",
                    "Bps",
                    [Query("sum by (direction) (rate(kvtier_handoffs_claimed_bytes_total[]))", "{{direction}}")],
                ),
                TimeSeries(
                    "Duration of holds",
                    "Average of the holds that ended.",
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
                TimeSeries(
                    "Held now",
                    "Held requests by direction.",
                    "short",
                    [Query("sum by (direction) (kvtier_holds[])", "{{direction}}")],
                    stacked=True,
                ),
            ],
        ),
    ],
)

DASHBOARDS = (FLEET, NODE, TIER, TENANT, HANDOFF)
