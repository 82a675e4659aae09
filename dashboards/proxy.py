"""Definition of the dashboard of examples/disagg_proxy, for prefill and decode engines."""

from __future__ import annotations

from .definitions import quantile
from .panels import DashboardSpec, Query, Stat, TimeSeries

__all__ = ["PROXY"]


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate(disagg_proxy_{metric}_total[]))"


def _seconds(title: str, description: str, metric: str, by: str) -> TimeSeries:
    """Returns a panel with the median and the 99th percentile of a histogram."""
    legend = "".join(f"{{{{{label}}}}} " for label in by.split(", ") if label != "job")
    return TimeSeries(
        title,
        description,
        "s",
        [
            Query(quantile(share, f"disagg_proxy_{metric}_seconds", by), f"{legend}p{round(share * 100)}")
            for share in (0.5, 0.99)
        ],
    )


PROXY = DashboardSpec(
    "kvtier-proxy",
    "kvtier / proxy",
    "Proxies for prefill and decode engines: requests, reuse of held blocks, and failures of engines.",
    [
        (
            "At a glance",
            [
                Stat("Proxies", "Proxies that answer.", "short", Query("count(disagg_proxy_entries[])")),
                Stat("Requests", "Requests of clients.", "reqps", Query("sum(rate(disagg_proxy_requests_total[]))")),
                Stat(
                    "Reuse",
                    "Share of turns that continue from blocks that the decode engine held.",
                    "percentunit",
                    Query('sum(rate(disagg_proxy_turns_total[reuse="hit"])) / sum(rate(disagg_proxy_turns_total[]))'),
                ),
                Stat(
                    "Engines down",
                    "Engines that get no requests, summed over all proxies.",
                    "short",
                    Query("count(disagg_proxy_instance_up[]) - sum(disagg_proxy_instance_up[])"),
                    1,
                ),
                Stat(
                    "Requests in progress",
                    "At all engines.",
                    "short",
                    Query("sum(disagg_proxy_instance_outstanding[])"),
                ),
                Stat(
                    "Conversations",
                    "Conversations in the tables of the proxies.",
                    "short",
                    Query("sum(disagg_proxy_entries[])"),
                ),
            ],
        ),
        (
            "Requests",
            [
                TimeSeries(
                    "Requests, by outcome",
                    "examples/disagg_proxy/README.md explains each outcome.",
                    "reqps",
                    [Query(_rate("requests", "outcome"), "{{outcome}}")],
                    stacked=True,
                ),
                TimeSeries(
                    "Turns, by reuse",
                    "`expired` and `miss` in long conversations mean that holds end too early, or were lost.",
                    "reqps",
                    [Query(_rate("turns", "reuse"), "{{reuse}}")],
                    stacked=True,
                ),
                _seconds("First token", "Time until the first token of a stream.", "first_token", "route"),
                _seconds("Whole answer", "Time until the end of an answer.", "duration", "route"),
                _seconds("Prefill", "Time of the calls of prefill engines.", "prefill", "job"),
                TimeSeries(
                    "Requests in progress, by engine",
                    "The label `instance` of the proxy is called `exported_instance` here.",
                    "short",
                    [
                        Query(
                            "sum by (role, exported_instance) (disagg_proxy_instance_outstanding[])",
                            "{{role}} {{exported_instance}}",
                        )
                    ],
                ),
            ],
        ),
        (
            "Failures",
            [
                TimeSeries(
                    "Failures of engines, by cause",
                    "Most of these requests were sent to another engine.",
                    "reqps",
                    [Query(_rate("retries", "role, cause"), "{{role}} {{cause}}")],
                ),
                TimeSeries(
                    "Turns without a prefill engine",
                    "The decode engine computed the prompt.",
                    "reqps",
                    [Query(_rate("fallbacks", "cause"), "{{cause}}")],
                ),
                TimeSeries(
                    "Unused entries",
                    "Entries that were removed because they expired, or because of the limits.",
                    "cps",
                    [Query(_rate("entries_evicted", "reason"), "{{reason}}")],
                ),
                TimeSeries(
                    "Hints, by outcome",
                    "Hints for kvtier servers about the conversations of agents.",
                    "cps",
                    [Query(_rate("hints", "action, outcome"), "{{action}} {{outcome}}")],
                ),
                TimeSeries(
                    "Failed calls of the shared state",
                    "Calls of the server of `--state`. Meanwhile each proxy uses its own table.",
                    "cps",
                    [Query(_rate("state_errors", "operation"), "{{operation}}")],
                ),
            ],
        ),
    ],
    info="disagg_proxy_entries",
)
