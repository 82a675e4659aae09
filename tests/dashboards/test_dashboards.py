"""Static checks of dashboards and rules. `test_live` evaluates them in Prometheus."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
import yaml
from disagg_proxy.fleet import Fleet
from disagg_proxy.metrics import Metrics
from expressions import (
    Expression,
    alerts,
    boards,
    metrics_in,
    panels,
    recordings,
    rules,
    variables,
    without_comparisons,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.build import FOLDER, rendered
from kvtier.server.telemetry.definitions import METRICS

HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")

TARGET = {"job", "instance"}
"""Labels that a scrape adds."""

KNOWN = {row.exposed: set(row.labels) for row in METRICS.values() if row.kind != "histogram"} | {
    f"{row.name}{end}": {*row.labels, "le"}
    for row in METRICS.values()
    if row.kind == "histogram"
    for end in HISTOGRAM_SUFFIXES
}
"""Metrics of a server with their labels."""

PROXY = {
    f"{family.name}{end}": {*collector._labelnames} - {"instance"} | {"le", "exported_instance"}  # type: ignore[attr-defined]
    for collector in Metrics((Fleet([]),), lambda: 0)._registry._collector_to_names
    for family in collector.describe()  # type: ignore[attr-defined]
    for end in {"counter": ("_total",), "histogram": HISTOGRAM_SUFFIXES}.get(family.type, ("",))
}
"""Metrics of the proxy with their labels. Prometheus renames its label `instance`."""

OTHERS = {"up": set[str](), "ALERTS": {"alertname", "alertstate"}} | {
    f"process_{name}": set[str]()
    for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds", "start_time_seconds")
}
"""Metrics of Prometheus itself, and standard process metrics."""


def kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


def all_expressions() -> list[Expression]:
    ruled = [Expression(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    return panels() + variables() + ruled


def test_json_is_up_to_date() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    assert committed == rendered(), "run make generate"


def test_json_survives_a_round_trip_through_the_sdk() -> None:
    """Parsed into the SDK's types and encoded again, it is equal; all panel types are known."""
    register_default_plugins()
    for name, board in boards():
        again = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
        assert again == board, name
        assert {panel["type"] for panel in board["panels"]} <= {"row", "timeseries", "stat", "table"}, name


@pytest.mark.parametrize(("name", "board"), list(boards()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_panel_is_complete(name: str, board: dict[str, Any]) -> None:
    """Each panel has a description, a unit, an expression, a free grid position and a unique id."""
    shown = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert board["uid"] == f"kvtier-{name.removesuffix('.json')}"
    cells: Counter[tuple[int, int]] = Counter()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells.update((place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"]))
    assert set(cells.values()) == {1}
    for panel in shown:
        assert panel["description"].endswith(".")
        assert panel["targets"]
        overrides = panel["fieldConfig"]["overrides"]
        assert panel["fieldConfig"]["defaults"].get("unit") or len(overrides) == len(panel["targets"])
        assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("expression", all_expressions(), ids=lambda expression: expression.where)
def test_every_metric_exists_with_these_labels(expression: Expression) -> None:
    """Expressions use only metrics and labels that a server exposes."""
    named = list(metrics_in(expression.text))
    assert named
    for name, labels in named:
        if ":" in name:
            assert name in recordings()
        else:
            known = (KNOWN | PROXY | OTHERS).get(name)
            assert known is not None, name
            assert labels <= known | TARGET, name


def test_every_metric_is_used() -> None:
    """Each metric appears in a panel or rule, except some for queries by hand."""
    named = {name for expression in all_expressions() for name, _ in metrics_in(expression.text)}
    seen = {re.sub(r"_(bucket|sum|count)$", "", name) if name.endswith(HISTOGRAM_SUFFIXES) else name for name in named}
    unseen = {row.exposed for row in METRICS.values()} - seen
    by_hand = {"kvtier_namespaces", "kvtier_tier_jobs", "kvtier_sessions_attached"}
    assert unseen == by_hand
    assert {name for name in PROXY if not name.endswith(("_sum", "_count", "_created"))} <= named


def test_table_columns_have_headings() -> None:
    """Grafana names columns `Value #A`, `Value #B`, or `Value` for one query. All are renamed."""
    tables = [panel for _, board in boards() for panel in board["panels"] if panel["type"] == "table"]
    assert {len(panel["targets"]) for panel in tables} >= {1, 3}
    for panel in tables:
        letters = [target["refId"] for target in panel["targets"]]
        merge, organize = panel["transformations"]
        assert merge["id"] == "merge"
        renamed = organize["options"]["renameByName"]
        assert list(renamed) == (["Value"] if len(letters) == 1 else [f"Value #{letter}" for letter in letters])
        headings = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
        assert set(renamed.values()) == headings
        assert all(target["instant"] and target["format"] == "table" for target in panel["targets"])


def test_all_jobs_means_kvtier_jobs() -> None:
    """The job variable has no `.*`, because `up` would then count other programs' targets."""
    for name, board in boards():
        job = next(variable for variable in board["templating"]["list"] if variable["name"] == "job")
        assert job["includeAll"], name
        assert "allValue" not in job, name


def test_every_rate_uses_the_rate_interval() -> None:
    """A fixed range is empty if the scrape interval is longer."""
    for path in FOLDER.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"\[(\$?\w+)\]", text)) <= {"$__rate_interval"}
        assert "[]" not in re.sub(r'": \[\]', "", text)


@pytest.mark.parametrize(("name", "alert"), alerts().items(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_alert_is_complete(name: str, alert: dict[str, Any]) -> None:
    """Each alert has a severity, a summary, a description and a runbook link."""
    assert re.fullmatch(r"Kvtier([A-Z][a-z]+)+", name)
    assert alert["labels"] == {"severity": alert["labels"]["severity"]}
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    assert "$labels.instance" in alert["annotations"]["summary"]
    assert alert["annotations"]["description"].endswith(".")
    assert alert["annotations"]["runbook"] == f"docs/troubleshooting.md#{kebab(name)}"
    assert without_comparisons(alert["expr"]) != alert["expr"]


def test_every_alert_has_a_runbook_heading() -> None:
    page = FOLDER.parents[1] / "docs" / "troubleshooting.md"
    headings = set(re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert {kebab(name) for name in alerts()} <= headings


def test_every_alert_has_a_promtool_test() -> None:
    """`alerts_test.yml` expects exactly the defined alerts (`test_live` runs it)."""
    text = (FOLDER.parents[1] / "tests" / "dashboards" / "alerts_test.yml").read_text(encoding="utf-8")
    tests = yaml.safe_load(text)["tests"]
    expected = [
        sample["labels"]
        for test in tests
        for question in test["promql_expr_test"]
        for sample in question["exp_samples"]
        if "ALERTS" in question["expr"]
    ]
    names = [re.search(r'alertname="(\w+)"', labels) for labels in expected]
    assert sorted(name[1] for name in names if name) == sorted(alerts())


def test_without_comparisons_keeps_labels_and_brackets() -> None:
    assert without_comparisons('a{b="> 1",c!="x"} == 0') == 'a{b="> 1",c!="x"}'
    assert without_comparisons("a / (b > 0) > 0.5 and on (c) d >= -1e3") == "a / (b > 0) and on (c) d"
