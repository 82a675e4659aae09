"""How every panel looks, in a few words: a question, a unit, expressions.

Expressions are written without the labels that choose servers: `kvtier_leases[]` and `kvtier_tier_hits_total[tier="cpu"]` become
`kvtier_leases{job=~"$job",instance=~"$instance"}` and so on; `rate(…)` is over `$__rate_interval`.
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

__all__ = ["Figure", "Lines", "Query", "Screen", "Sheet", "build", "promql"]

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_SELECTED = re.compile(r"(?<=[a-z])\[((?:[a-z]+(?:=|!=|=~|!~)\"[^\"]*\",?)*)\]")
_RATE = re.compile(r"\brate\((\w+(?:\{[^}]*\})?)\)")


@dataclass(frozen=True)
class Query:
    """One expression, and what its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Lines:
    """A panel of lines over time."""

    title: str
    why: str
    unit: str
    queries: Sequence[Query]
    stacked: bool = False
    width: int = 12
    most: float | None = None
    """Upper end of the scale, where it is known."""


@dataclass(frozen=True)
class Figure:
    """A panel of one large figure."""

    title: str
    why: str
    unit: str
    query: Query
    wrong: float | None = None
    """From here on it is red; below 0 it is never."""
    good: Literal["low", "high"] = "low"
    width: int = 4


@dataclass(frozen=True)
class Sheet:
    """A panel that is a table: a column per query, a row per value of the labels `by`."""

    title: str
    why: str
    by: Sequence[str]
    columns: Sequence[tuple[str, str, str]]
    """Heading, unit and expression of each."""
    width: int = 24


AnyPanel = Lines | Figure | Sheet


@dataclass(frozen=True)
class Screen:
    """A dashboard."""

    uid: str
    title: str
    why: str
    rows: Sequence[tuple[str, Sequence[AnyPanel]]]
    variables: Sequence[tuple[str, str, str]] = ()
    """Name, label and metric of each variable besides the servers: its values are those of the label of this name."""
    one_server: bool = False
    """Whether it is about one server at a time."""


def promql(expr: str) -> str:
    """Returns an expression as Prometheus reads it once Grafana has filled in its variables."""
    chosen = _SELECTED.sub(lambda match: _selector(match[1].rstrip(",")), expr)
    return _RATE.sub(r"rate(\1[$__rate_interval])", chosen)


def build(screen: Screen) -> Dashboard:
    """Returns the dashboard."""
    board = (
        dashboards.Dashboard(screen.title)
        .uid(screen.uid)
        .description(screen.why)
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
        .with_variable(_variable("job", "Job", "kvtier_build_info", hide=True))
        .with_variable(
            _variable("instance", "Server", 'kvtier_build_info{job=~"$job"}', all_values=not screen.one_server)
        )
    )
    for name, label, metric in screen.variables:
        board = board.with_variable(_variable(name, label, promql(f"{metric}[]")))
    number = 0
    for title, panels in screen.rows:
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
        if not hide:  # all jobs are those that the query finds: `up` has others as well
            variable = variable.all_value(".*")
    return variable.hide(VariableHide.HIDE_VARIABLE) if hide else variable


def _panel(panel: AnyPanel) -> timeseries.Panel | stat.Panel | table.Panel:
    if isinstance(panel, Lines):
        return _lines(panel)
    return _figure(panel) if isinstance(panel, Figure) else _sheet(panel)


def _targets(queries: Iterable[Query]) -> Iterable[prometheus.Dataquery]:
    for letter, query in zip("ABCDEFGHIJ", queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).datasource(_SOURCE).expr(promql(query.expr))
        yield target.legend_format(query.legend or "__auto")


def _lines(panel: Lines) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.why)
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
    if panel.most is not None:
        made = made.max(panel.most)
    for target in _targets(panel.queries):
        made = made.with_target(target.range())
    return made


def _figure(panel: Figure) -> stat.Panel:
    made = (
        stat.Panel()
        .title(panel.title)
        .description(panel.why)
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


def _thresholds(panel: Figure) -> dashboards.ThresholdsConfig:
    low, high = ("green", "red") if panel.good == "low" else ("red", "green")
    steps = [Threshold(value=None, color="blue" if panel.wrong is None else low)]
    if panel.wrong is not None:
        steps.append(Threshold(value=panel.wrong, color=high))
    return dashboards.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _sheet(panel: Sheet) -> table.Panel:
    made = (
        table.Panel()
        .title(panel.title)
        .description(panel.why)
        .datasource(_SOURCE)
        .span(panel.width)
        .height(8)
        .show_header(show_header=True)
    ).with_transformation(DataTransformerConfig(id_val="merge", options={}))
    queries = [Query(expr) for _, _, expr in panel.columns]
    renamed = {}
    for target, (heading, _, _) in zip(_targets(queries), panel.columns, strict=True):
        query = target.instant().format(PromQueryFormat.TABLE)
        # Grafana calls the figures of several queries apart, and those of a single one just that.
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
