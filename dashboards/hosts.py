"""Definition of the dashboard with all hosts: tables, extremes, shared tiers, bytes in between."""

from __future__ import annotations

from .definitions import fill, hit_ratio, quantile
from .panels import DashboardSpec, Query, Stat, Table, TimeSeries

__all__ = ["HOSTS"]

_MOST = 10
"""Number of hosts in a panel with the highest or lowest values."""


def _top(expr: str) -> list[Query]:
    return [Query(f"topk({_MOST}, {expr})", "{{instance}}")]


def _shared(expr: str) -> str:
    """Returns the expression for the tiers that other servers share."""
    return f'({expr} and on (job, instance, tier) kvtier_tier_info[shared="yes"])'


HOSTS = DashboardSpec(
    "kvtier-hosts",
    "kvtier / hosts",
    "All hosts side by side, also those that do not answer; shared tiers; bytes between hosts.",
    [
        (
            "At a glance",
            [
                Stat("Hosts", "Scrape targets of kvtier.", "short", Query("count(up[])")),
                Stat(
                    "Not answering",
                    "Targets that Prometheus cannot scrape. Their engines compute every prompt.",
                    "short",
                    Query("count(up[]) - sum(up[])"),
                    1,
                ),
                Stat(
                    "Draining",
                    "Servers that refuse new work.",
                    "short",
                    Query("sum(kvtier_draining[])"),
                ),
                Stat(
                    "Versions",
                    "More than one during an upgrade. docs/upgrading.md has the order.",
                    "short",
                    Query("count(count by (version) (kvtier_build_info[]))"),
                    2,
                ),
                Stat(
                    "Hosts without a shared tier",
                    "Hosts that do not reach a store that all hosts share. They use their own tiers.",
                    "short",
                    Query(f"count(count by (instance) ({_shared('kvtier_tier_healthy[]')} == 0)) or vector(0)"),
                    1,
                ),
                Stat("Hit ratio", "Over all hosts.", "percentunit", Query(hit_ratio())),
            ],
        ),
        (
            "Hosts",
            [
                Table(
                    "All hosts",
                    "One row per host. A host that does not answer has 0 under `up`, and no other values.",
                    ["instance"],
                    [
                        ("up", "short", "max by (instance) (up[])"),
                        ("up for", "s", "max by (instance) (kvtier_uptime_seconds[])"),
                        ("draining", "short", "max by (instance) (kvtier_draining[])"),
                        ("memory used", "percentunit", fill("instance", 'tier="cpu"')),
                        ("hit ratio", "percentunit", hit_ratio("instance")),
                        ("keys looked up", "cps", "sum by (instance) (rate(kvtier_lookup_keys_total[]))"),
                        ("sessions", "short", "sum by (instance) (kvtier_sessions[])"),
                        ("waiting to be stored", "bytes", "sum by (instance) (kvtier_tier_queued_bytes[])"),
                        ("loop lag, p99", "s", quantile(0.99, "kvtier_loop_lag_seconds", "instance")),
                        ("tiers in trouble", "short", "sum by (instance) (1 - kvtier_tier_healthy[])"),
                    ],
                ),
                Table(
                    "Version of each host",
                    "Hosts by version, and the id of the process: a new id is a restart.",
                    ["instance", "version", "epoch"],
                    [("servers", "short", "count by (instance, version, epoch) (kvtier_build_info[])")],
                ),
            ],
        ),
        (
            "Extremes",
            [
                TimeSeries(
                    "Lowest hit ratios",
                    "A host far below the others lacks memory, or the router sends it other prompts.",
                    "percentunit",
                    [Query(f"bottomk({_MOST}, {hit_ratio('instance')})", "{{instance}}")],
                    max_value=1,
                ),
                TimeSeries(
                    "Most keys looked up",
                    "A host far above the others gets more requests.",
                    "cps",
                    _top("sum by (instance) (rate(kvtier_lookup_keys_total[]))"),
                ),
                TimeSeries(
                    "Most blocks evicted from memory",
                    "Blocks that are evicted and requested again need more memory or a shared tier.",
                    "cps",
                    _top('sum by (instance) (rate(kvtier_tier_evictions_total[tier="cpu"]))'),
                ),
                TimeSeries(
                    "Most blocks not stored",
                    "Blocks that a tier did not store because the tier or its queue was full.",
                    "cps",
                    _top("sum by (instance) (rate(kvtier_tier_dropped_total[]))"),
                ),
                TimeSeries(
                    "Longest event-loop lag, p99",
                    "Above 0.1 s the server or its host is overloaded.",
                    "s",
                    _top(quantile(0.99, "kvtier_loop_lag_seconds", "instance")),
                ),
                TimeSeries(
                    "Most refused calls",
                    "The dashboard kvtier / node has the reasons.",
                    "reqps",
                    _top("(sum by (instance) (rate(kvtier_refusals_total[])) or sum by (instance) (0 * up[]))"),
                ),
            ],
        ),
        (
            "Shared tiers",
            [
                Table(
                    "Shared tiers",
                    "Tiers whose store all hosts use, for example Valkey or S3. Sums over the hosts.",
                    ["tier"],
                    [
                        ("hosts", "short", f"count by (tier) {_shared('kvtier_tier_healthy[]')}"),
                        ("hosts in trouble", "short", f"sum by (tier) {_shared('1 - kvtier_tier_healthy[]')}"),
                        ("hits", "cps", f"sum by (tier) {_shared('rate(kvtier_tier_hits_total[])')}"),
                        ("misses", "cps", f"sum by (tier) {_shared('rate(kvtier_tier_misses_total[])')}"),
                        ("waiting to be stored", "bytes", f"sum by (tier) {_shared('kvtier_tier_queued_bytes[]')}"),
                    ],
                    width=12,
                ),
                Table(
                    "Shared tiers of each host",
                    "1 if the host reaches the store. 0 also while the host's circuit breaker is open.",
                    ["instance", "tier"],
                    [("healthy", "short", f"min by (instance, tier) {_shared('kvtier_tier_healthy[]')}")],
                    width=12,
                ),
                TimeSeries(
                    "Bytes to and from shared tiers",
                    "Load of the store and of the network, from all hosts.",
                    "Bps",
                    [
                        Query(
                            f"sum by (tier, operation) {_shared('rate(kvtier_tier_job_bytes_total[])')}",
                            "{{tier}} {{operation}}",
                        )
                    ],
                ),
                TimeSeries(
                    "Duration of jobs in shared tiers, p99",
                    "Without the time in the queue. The store or the network is slow if all hosts are.",
                    "s",
                    [
                        Query(
                            "histogram_quantile(0.99, sum by (le, tier, operation) "
                            f"{_shared('rate(kvtier_tier_job_duration_seconds_bucket[])')})",
                            "{{tier}} {{operation}}",
                        )
                    ],
                ),
            ],
        ),
        (
            "Between hosts",
            [
                TimeSeries(
                    "Most bytes in streams",
                    "Bytes to and from engines of other hosts, and of engines without shared memory.",
                    "Bps",
                    _top("sum by (instance) (rate(kvtier_transfer_bytes_total[]))"),
                ),
                TimeSeries(
                    "Most bytes claimed in hand-offs",
                    "By the server that held the request.",
                    "Bps",
                    _top("sum by (instance) (rate(kvtier_handoffs_claimed_bytes_total[]))"),
                ),
                TimeSeries(
                    "Searches for blocks at other hosts",
                    "Requests that name a source, by outcome. `unreachable` and `refused` need attention.",
                    "reqps",
                    [Query("sum by (outcome) (rate(kvtier_source_searches_total[]))", "{{outcome}}")],
                ),
            ],
        ),
    ],
)
