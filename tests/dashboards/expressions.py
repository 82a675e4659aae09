"""Expressions of the dashboards and rules, in the form in which tests send them to Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = [
    "Expression",
    "alerts",
    "metrics_in",
    "panels",
    "recordings",
    "rule_files",
    "variables",
    "without_comparisons",
]

FOLDER = Path(__file__).resolve().parents[2] / "dashboards"

ANY = {"job": "kvtier", "instance": ".*", "tier": ".*", "tenant": ".*", "__rate_interval": "10s"}
"""Values of Grafana's variables if everything is selected and the scrape interval is one second."""

PROXY = {"job": "disagg-proxy"}
"""Values that differ for the dashboard of the proxy."""

_COMPARISON = re.compile(r"\s*(?:==|!=|>=|<=|>|<)\s*(?:bool\s+)?-?[0-9][0-9.e+-]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTOR = re.compile(r"\b((?:kvtier|disagg_proxy|process)_\w+|up|ALERTS|instance\w*:kvtier\w*:\w+)(?:\{([^}]*)\})?")


@dataclass(frozen=True)
class Expression:
    where: str
    text: str


def boards() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((FOLDER / "grafana").glob("*.json")):
        yield path.name, json.loads(path.read_text(encoding="utf-8"))


def panels(values: Mapping[str, str] = ANY) -> list[Expression]:
    """Returns the expressions of all panels with their variables filled in."""
    return [
        Expression(f"{name}: {panel['title']} [{target['refId']}]", filled(target["expr"], of_board(name, values)))
        for name, board in boards()
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


def variables(values: Mapping[str, str] = ANY) -> list[Expression]:
    """Returns, for each variable, the metric that its values come from."""
    found = []
    for name, board in boards():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                metric = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
                assert metric[2] == variable["name"]
                found.append(Expression(f"{name}: ${variable['name']}", filled(metric[1], of_board(name, values))))
    return found


def of_board(name: str, values: Mapping[str, str]) -> Mapping[str, str]:
    return {**values, **PROXY} if name == "proxy.json" else values


def filled(text: str, values: Mapping[str, str]) -> str:
    """Returns an expression with its variables filled in. An unknown variable is an error."""
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], text)


def rule_files() -> list[Path]:
    return sorted((FOLDER / "rules").glob("*.yml"))


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for path in rule_files()
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def recordings() -> dict[str, str]:
    """Returns the expressions of the recording rules by name."""
    return {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def without_comparisons(text: str) -> str:
    """Removes the comparisons with numbers outside brackets, so that the compared value is left.

    Conditions joined by `and` stay joined, so the labels of both sides must still match.
    """
    parts, depth, position = [], 0, 0
    while position < len(text):
        string = _STRING.match(text, position)
        comparison = _COMPARISON.match(text, position) if depth == 0 else None
        if string:
            parts.append(string[0])
            position = string.end()
        elif comparison:
            position = comparison.end()
        else:
            depth += (text[position] in "({[") - (text[position] in ")}]")
            parts.append(text[position])
            position += 1
    return "".join(parts)


def metrics_in(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yields the metrics of an expression with the labels that select them."""
    for name, labels in _SELECTOR.findall(text):
        yield name, frozenset(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", _STRING.sub('""', labels)))
