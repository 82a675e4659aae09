"""Every expression of every panel and rule, asked of a real Prometheus that scrapes two real servers under load."""

from __future__ import annotations

import contextlib
import math
import subprocess
import time
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
from load import busy_server
from prometheus import Prometheus, program, running

pytestmark = [pytest.mark.prometheus, pytest.mark.slow, pytest.mark.timeout(300)]

HERE = Path(__file__).resolve().parent
PATIENCE_SECONDS = 120.0
"""Some twenty are enough on a quiet machine: for two evaluations after two scrapes after the slowest thing under load."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has two busy servers as its targets, all rules, and every alert once more so that it fires at once."""
    program("prometheus")
    directory = tmp_path_factory.mktemp("kvt")
    rules = [hurried(path, directory) for path in rule_files()] + [armed(directory)]
    with contextlib.ExitStack() as stack:
        ports = {name: stack.enter_context(busy_server(directory / name))[1] for name in ("one", "two")}
        yield stack.enter_context(running(directory, ports, rules))


def hurried(path: Path, directory: Path) -> Path:
    """Returns a copy of a file of rules, without the intervals of its groups."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    for group in content["groups"]:
        group.pop("interval", None)
    copy = directory / path.name
    copy.write_text(yaml.safe_dump(content), encoding="utf-8")
    return copy


def armed(directory: Path) -> Path:
    """Returns a file of rules in which each alert fires whenever there is anything to compare."""
    changed = [
        alert | {"alert": f"Armed{name}", "expr": without_comparisons(alert["expr"]), "for": "0s"}
        for name, alert in alerts().items()
    ]
    path = directory / "armed.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "armed", "rules": changed}]}), encoding="utf-8")
    return path


def unanswered(prometheus: Prometheus, expressions: Sequence[Expression]) -> dict[str, str]:
    """Returns what is wrong with each of these that has not had a figure in time; what is wrong in itself ends it at once."""
    left = {expression.where: expression for expression in expressions}
    deadline = time.monotonic() + PATIENCE_SECONDS
    wrong: dict[str, str] = {}
    while left and time.monotonic() < deadline:
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
        time.sleep(0.5)
    return wrong


def test_every_panel_has_an_answer(prometheus: Prometheus) -> None:
    """A figure, in the right place: not an error, nothing, or only NaN."""
    assert unanswered(prometheus, panels()) == {}


def test_every_variable_has_values(prometheus: Prometheus) -> None:
    """Whoever opens a screen has something to choose from."""
    assert unanswered(prometheus, variables()) == {}


def test_panels_answer_for_one_choice(prometheus: Prometheus) -> None:
    """One server, one tier, one tenant: as somebody looks at them who wants to know."""
    chosen = {"job": "kvtier", "instance": "two", "tier": "lmdb", "tenant": "acme", "__rate_interval": "10s"}
    assert unanswered(prometheus, panels(chosen)) == {}


def test_every_recording_records(prometheus: Prometheus) -> None:
    """Each is there under its name, for both servers."""
    expressions = [Expression(name, f"count by (instance) ({name}) > 0") for name in recordings()]
    assert unanswered(prometheus, expressions) == {}
    for name in recordings():
        assert len(prometheus.ask(f"count by (instance) ({name})")) == 2, name


def test_every_alert_has_something_to_compare(prometheus: Prometheus) -> None:
    """The alert without its comparisons is not empty: silence means that all is well, and not that a name is wrong."""
    compared = [Expression(name, without_comparisons(alert["expr"])) for name, alert in alerts().items()]
    assert unanswered(prometheus, compared) == {}


def test_every_rule_is_evaluated_and_every_text_is_filled_in(prometheus: Prometheus) -> None:
    """Prometheus itself has no complaint about a rule; each alert, made to fire, says of what."""
    wanted = {f"Armed{name}" for name in alerts()}
    deadline = time.monotonic() + PATIENCE_SECONDS
    fired: dict[str, list[dict[str, Any]]] = {}
    while fired.keys() != wanted and time.monotonic() < deadline:
        time.sleep(0.5)
        firing = [alert for alert in prometheus.get("/api/v1/alerts")["alerts"] if alert["state"] == "firing"]
        fired = {}
        for alert in firing:
            name = alert["labels"]["alertname"]
            if name.startswith("Armed"):
                fired.setdefault(name, []).append(alert)
    assert fired.keys() == wanted
    for name, firing in fired.items():
        for alert in firing:
            assert alert["labels"]["instance"] in ("one", "two"), name
            for text in alert["annotations"].values():
                assert "<" not in text, f"{name}: {text}"  # "<no value>", "<error expanding template …>"
            assert alert["labels"]["instance"] in alert["annotations"]["summary"], name
    for group in prometheus.get("/api/v1/rules")["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok", f"{rule['name']}: {rule.get('lastError')}"


def test_nothing_is_wrong_that_is_not(prometheus: Prometheus) -> None:
    """Two servers that are busy and well: no critical alert is even pending."""
    states = prometheus.get("/api/v1/alerts")["alerts"]
    critical = [
        alert["labels"]
        for alert in states
        if alert["labels"]["severity"] == "critical" and not alert["labels"]["alertname"].startswith("Armed")
    ]
    assert critical == []


def test_promtool_agrees() -> None:
    """The rules are well-formed, and each alert fires in `alerts_test.yml`."""
    promtool = program("promtool")
    checked = subprocess.run([promtool, "check", "rules", *rule_files()], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    tested = subprocess.run(
        [promtool, "test", "rules", "alerts_test.yml"], cwd=HERE, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stderr + tested.stdout
