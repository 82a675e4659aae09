"""Evaluates every panel and rule in a real Prometheus that scrapes two servers under load."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import urllib.error
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from expressions import (
    Expression,
    alerts,
    panels,
    recordings,
    rule_files,
    variables,
    without_comparisons,
)
from harness.polling import polls
from load import busy_proxy, busy_server
from prometheus import Prometheus, program, running

pytestmark = [pytest.mark.prometheus, pytest.mark.slow, pytest.mark.timeout(300)]

HERE = Path(__file__).resolve().parent
TIMEOUT_SECONDS = 120.0
"""About 20 s are enough on an idle machine: two evaluations after two scrapes."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes two busy servers and a proxy, with all rules.

    A copy of each alert fires at once.
    """
    program("prometheus")
    directory = tmp_path_factory.mktemp("kvt")
    rules = [without_intervals(path, directory) for path in rule_files()] + [always_firing(directory)]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        # The class of the tier `common` is in the folder `tests`.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH")))))
        ports = {name: stack.enter_context(busy_server(directory / name))[1] for name in ("one", "two")}
        jobs = {"kvtier": ports, "disagg-proxy": {"two": stack.enter_context(busy_proxy())}}
        yield stack.enter_context(running(directory, jobs, rules))


def without_intervals(path: Path, directory: Path) -> Path:
    """Returns a copy of a rule file without the intervals of its groups."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    for group in content["groups"]:
        group.pop("interval", None)
    copy = directory / path.name
    copy.write_text(yaml.safe_dump(content), encoding="utf-8")
    return copy


def always_firing(directory: Path) -> Path:
    """Returns a rule file in which each alert fires if its compared value exists."""
    changed = [
        alert | {"alert": f"Armed{name}", "expr": without_comparisons(alert["expr"]), "for": "0s"}
        for name, alert in alerts().items()
    ]
    path = directory / "armed.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "armed", "rules": changed}]}), encoding="utf-8")
    return path


def unanswered(prometheus: Prometheus, expressions: Sequence[Expression]) -> dict[str, str]:
    """Returns the expressions without a finite value in time. An invalid one returns at once."""
    left = {expression.where: expression for expression in expressions}
    wrong: dict[str, str] = {}
    for _ in polls(TIMEOUT_SECONDS, 0.5):
        if not left:
            break
        for where, expression in list(left.items()):
            try:
                figures = prometheus.ask(expression.text)
            except urllib.error.HTTPError as error:
                return {where: f"{expression.text}: {error.msg}"}
            if any(map(math.isfinite, figures)):
                left.pop(where)
                wrong.pop(where, None)
            else:
                wrong[where] = f"{expression.text}: {'not a number' if figures else 'nothing'}"
    return wrong


def test_every_panel_has_a_value(prometheus: Prometheus) -> None:
    """Each expression has a finite value: no error, no empty result, not only NaN."""
    assert unanswered(prometheus, panels()) == {}


def test_every_variable_has_values(prometheus: Prometheus) -> None:
    assert unanswered(prometheus, variables()) == {}


def test_panels_have_values_for_one_server(prometheus: Prometheus) -> None:
    """With one server, one tier and one tenant selected."""
    chosen = {"job": "kvtier", "instance": "two", "tier": "lmdb", "tenant": "acme", "__rate_interval": "10s"}
    assert unanswered(prometheus, panels(chosen)) == {}


def test_every_recording_rule_has_values(prometheus: Prometheus) -> None:
    """Each recorded metric exists for both servers."""
    expressions = [Expression(name, f"count by (instance) ({name}) > 0") for name in recordings()]
    assert unanswered(prometheus, expressions) == {}
    for name in recordings():
        assert len(prometheus.ask(f"count by (instance) ({name})")) == 2, name


def test_every_alert_compares_an_existing_value(prometheus: Prometheus) -> None:
    """Without comparisons the expression has a value: a wrong name cannot silence an alert."""
    compared = [Expression(name, without_comparisons(alert["expr"])) for name, alert in alerts().items()]
    assert unanswered(prometheus, compared) == {}


def test_rules_evaluate_and_alert_texts_are_filled_in(prometheus: Prometheus) -> None:
    """All rules are healthy, and the summary of each firing alert names its server."""
    wanted = {f"Armed{name}" for name in alerts()}
    fired: dict[str, list[dict[str, Any]]] = {}
    for _ in polls(TIMEOUT_SECONDS, 0.5):
        firing = [alert for alert in prometheus.get("/api/v1/alerts")["alerts"] if alert["state"] == "firing"]
        fired = {}
        for alert in firing:
            name = alert["labels"]["alertname"]
            if name.startswith("Armed"):
                fired.setdefault(name, []).append(alert)
        if fired.keys() == wanted:
            break
    assert fired.keys() == wanted
    for name, firing in fired.items():
        for alert in firing:
            assert alert["labels"]["instance"] in ("one", "two"), name
            for text in alert["annotations"].values():
                assert "<" not in text, f"{name}: {text}"  # "<no value>", "<error …>"
            assert alert["labels"]["instance"] in alert["annotations"]["summary"], name
    for group in prometheus.get("/api/v1/rules")["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok", f"{rule['name']}: {rule.get('lastError')}"


def test_healthy_servers_have_no_critical_alert(prometheus: Prometheus) -> None:
    """No critical alert of the two busy servers is pending or firing."""
    states = prometheus.get("/api/v1/alerts")["alerts"]
    critical = [
        alert["labels"]
        for alert in states
        if alert["labels"]["severity"] == "critical" and not alert["labels"]["alertname"].startswith("Armed")
    ]
    assert critical == []


def test_promtool_accepts_the_rules() -> None:
    """The rules are well-formed, and `alerts_test.yml` passes."""
    promtool = program("promtool")
    checked = subprocess.run([promtool, "check", "rules", *rule_files()], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    tested = subprocess.run(
        [promtool, "test", "rules", "alerts_test.yml"], cwd=HERE, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stderr + tested.stdout
