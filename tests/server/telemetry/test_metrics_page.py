"""The table of all metrics agrees with the metrics that a server exposes."""

from __future__ import annotations

import importlib.util
import re
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType

from harness.launch import launch
from harness.payloads import filled, key_of, namespace_of, payload
from harness.traffic import PART, wait_connected
from prometheus_client.parser import text_string_to_metric_families

from kvtier.client import Client
from kvtier.server.telemetry.definitions import METRICS, Kind

ROOT = Path(__file__).resolve().parents[3]
CONFIG = '[tenants.acme]\nquota = "25%"\nlimit = "50%"\n'

Shape = tuple[str, frozenset[str]]
"""Type of a metric, and its labels."""


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "tools" / "metrics_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exposed(text: str) -> dict[str, Shape]:
    """Returns the exposed metrics, by the names of the table."""
    shapes: dict[str, Shape] = {}
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        kind: Kind | str = family.type
        name = family.name
        if kind == "gauge" and name.endswith("_info"):  # the text format has no type for infos
            kind, name = "info", name.removesuffix("_info")
        assert family.samples, name
        if not name.startswith("process_"):
            shapes[name] = (kind, frozenset(labels))
    return shapes


def test_the_page_is_generated() -> None:
    """The file equals the output of the tool."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == tool().page(), "run tools/metrics_page.py"


def test_names_follow_the_conventions() -> None:
    """Names end in base units without `_total`; help is a sentence; labels are in snake case."""
    for name, row in METRICS.items():
        assert re.fullmatch(r"kvtier_[a-z][a-z_]*[a-z]", name)
        assert not name.endswith(("_total", "_info", "_count", "_sum", "_bucket"))
        assert row.text.endswith(".")
        assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", label) for label in row.labels)
        if row.unit in ("bytes", "seconds"):
            assert name.endswith(f"_{row.unit}"), name
        assert row.kind == "info" or row.unit, name


def test_a_server_exposes_exactly_the_table(tmp_path: Path) -> None:
    """Name, type and labels of each metric, on a server after a hit and a miss of a tenant."""
    config = tmp_path / "kvtier.toml"
    config.write_text(CONFIG, encoding="utf-8")
    with launch(tmp_path, "--metrics", "127.0.0.1:0", "--config", str(config)) as server:
        port = server.wait_ready()["metrics_port"]
        with Client(f"unix:{tmp_path}/s", namespace=namespace_of(PART, tenant="acme")) as client:
            wait_connected(client)
            client.store([key_of(1)], [payload(key_of(1), PART)])
            assert client.load([key_of(1), key_of(2)], filled(2, PART)) == 1
            client.lookup(
                [key_of(number) for number in range(10, 10_000)], prefix=False
            ).release()  # enough for a miss ratio curve
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/metrics")
        found = exposed(connection.getresponse().read().decode())
        connection.close()
        assert server.end() == 0
    table = {name: (row.kind, frozenset(row.labels)) for name, row in METRICS.items()}
    assert found == table
