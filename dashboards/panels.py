"""Panel types of the dashboards, and their conversion to Grafana's JSON model.

Expressions omit the labels that select servers: `kvtier_leases[]` becomes
`kvtier_leases{job=~"$job",instance=~"$instance"}`, and `kvtier_tier_hits_total[tier="cpu"]` gets the
same labels added. `rate(…)` is over `$__rate_interval`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Panel,
    Threshold,
    ThresholdsMode,
    VariableHide,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

__all__ = ["DashboardSpec", "Query", "Stat", "Table", "TimeSeries", "build", "promql"]

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_SELECTED = re.compile(r"(?<=[a-z])\[((?:[a-z]+(?:=|!=|=~|!~)\"[^\"]*\",?)*)\]")
_RATE = re.compile(r"\brate\((\w+(?:\{[^}]*\})?)\)")


@dataclass(frozen=True)
class Query:
    """One expression with the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class TimeSeries:
    """Time-series panel."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    stacked: bool = False
    width: int = 12
    max_value: float | None = None
    """Upper end of the scale, if it is known."""


@dataclass(frozen=True)
class Stat:
    """Stat panel: one large figure."""

    title: str
    description: str
    unit: str
    query: Query
    threshold: float | None = None
    """Value at which the colour changes between green and red. None: always blue."""
    good: Literal["low", "high"] = "low"
    width: int = 4


@dataclass(frozen=True)
class Table:
    """Table panel: one column per query, one row per value of the labels `by`."""

    title: str
    description: str
    by: Sequence[str]
    columns: Sequence[tuple[str, str, str]]
    """Heading, unit and expression of each column."""
    width: int = 24


AnyPanel = TimeSeries | Stat | Table


@dataclass(frozen=True)
class DashboardSpec:
    """Definition of one dashboard."""

    uid: str
    title: str
    description: str
    rows: Sequence[tuple[str, Sequence[AnyPanel]]]
    variables: Sequence[tuple[str, str, str]] = ()
    """Name, label and metric of each further variable, whose values are those of the label."""
    single_server: bool = False
    """Whether it shows one server at a time."""
    info: str = "kvtier_build_info"
    """Metric that each program of this dashboard has."""


def promql(expr: str) -> str:
    """Returns an expression with the server labels and the rate interval, as Grafana expects it."""
    chosen = _SELECTED.sub(lambda match: _selector(match[1].rstrip(",")), expr)
    return _RATE.sub(r"rate(\1[$__rate_interval])", chosen)


def build(spec: DashboardSpec) -> Dashboard:
    """Returns the dashboard in the types of Grafana's SDK."""
    board = (
        dashboards.Dashboard(spec.title)
        .uid(spec.uid)
        .description(spec.description)
        .tags(["kvtier"])
        .time("now-6h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(
            dashboards.DashboardLink("kvtier")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["kvtier"])
            .as_dropdown(as_dropdown=True)
            .include_vars(include_vars=True)
            .keep_time(keep_time=True)
        )
        .with_variable(dashboards.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_variable("job", "Job", spec.info, hide=True))
        .with_variable(
            _variable("instance", "Server", f'{spec.info}{{job=~"$job"}}', all_values=not spec.single_server)
        )
    )
    for name, label, metric in spec.variables:
        board = board.with_variable(_variable(name, label, promql(f"{metric}[]")))
    number = 0
    for title, panels in spec.rows:
        board = board.with_row(dashboards.Row(title))
        for panel in panels:
            number += 1
            board = board.with_panel(_panel(panel).id(number))
    built = board.build()
    for each in built.panels or ():
        if not isinstance(each, Panel):  # a row
            number += 1
            each.id_val = number
    return built


def _selector(labels: str) -> str:
    return '{job=~"$job",instance=~"$instance"' + (f",{labels}" if labels else "") + "}"


def _variable(
    name: str, label: str, metric: str, *, hide: bool = False, all_values: bool = True
) -> dashboards.QueryVariable:
    variable = (
        dashboards.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query({"query": f"label_values({metric}, {name})", "refId": name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )
    if all_values:
        everything = VariableOption(selected=True, text="All", value="$__all")
        variable = variable.multi(multi=True).include_all(include_all=True).current(everything)
        if not hide:  # `job` is hidden: its All must not match other jobs in `up`
            variable = variable.all_value(".*")
    return variable.hide(VariableHide.HIDE_VARIABLE) if hide else variable


def _panel(panel: AnyPanel) -> timeseries.Panel | stat.Panel | table.Panel:
    if isinstance(panel, TimeSeries):
        return _time_series(panel)
    return _stat(panel) if isinstance(panel, Stat) else _table(panel)


def _targets(queries: Iterable[Query]) -> Iterable[prometheus.Dataquery]:
    for letter, query in zip("ABCDEFGHIJ", queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).datasource(_SOURCE).expr(promql(query.expr))
        yield target.legend_format(query.legend or "__auto")


def _time_series(panel: TimeSeries) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .min(0)
        .span(panel.width)
        .height(8)
        .line_width(1)
        .fill_opacity(25 if panel.stacked else 8)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    if panel.stacked:
        made = made.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if panel.max_value is not None:
        made = made.max(panel.max_value)
    for target in _targets(panel.queries):
        made = made.with_target(target.range())
    return made


def _stat(panel: Stat) -> stat.Panel:
    made = (
        stat.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(4)
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.VALUE)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(values=False))
        .thresholds(_thresholds(panel))
    )
    for target in _targets([panel.query]):
        made = made.with_target(target.range())
    return made


def _thresholds(panel: Stat) -> dashboards.ThresholdsConfig:
    low, high = ("green", "red") if panel.good == "low" else ("red", "green")
    steps = [Threshold(value=None, color="blue" if panel.threshold is None else low)]
    if panel.threshold is not None:
        steps.append(Threshold(value=panel.threshold, color=high))
    return dashboards.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _table(panel: Table) -> table.Panel:
    made = (
        table.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .span(panel.width)
        .height(8)
        .show_header(show_header=True)
    ).with_transformation(DataTransformerConfig(id_val="merge", options={}))
    queries = [Query(expr) for _, _, expr in panel.columns]
    renamed = {}
    for target, (heading, _, _) in zip(_targets(queries), panel.columns, strict=True):
        query = target.instant().format(PromQueryFormat.TABLE)
        # Grafana names the columns `Value #A`, `Value #B`, …, or `Value` for a single query.
        renamed[f"Value #{query.build().ref_id}" if len(queries) > 1 else "Value"] = heading
        made = made.with_target(query)
    order = {name: number for number, name in enumerate([*panel.by, *renamed])}
    made = made.with_transformation(
        DataTransformerConfig(
            id_val="organize",
            options={"excludeByName": {"Time": True}, "indexByName": order, "renameByName": renamed},
        )
    )
    for heading, unit, _ in panel.columns:
        made = made.override_by_name(heading, [_unit(unit)])
    return made


def _unit(unit: str) -> DynamicConfigValue:
    return DynamicConfigValue(id_val="unit", value=unit)
