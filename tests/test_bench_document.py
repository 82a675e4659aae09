"""The pages about performance have the figures of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from bench.document import PAGES, RESULTS, documents, rendered
from bench.plots import bar_chart
from bench.report import Report

PLAIN = "# Page\n\n<!-- rows a.json ^b -->\n<!-- end -->\n\n<!-- facts a.json -->\n<!-- end -->\n"


def test_pages_and_plots_have_the_figures_of_the_results() -> None:
    """A typed figure, or new results without `make generate`, fail here."""
    for path, text in documents(RESULTS).items():
        assert path.read_text() == text, path


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_table_has_its_end(path: Path) -> None:
    """A place without an end would stay empty."""
    page = path.read_text()
    starts = re.findall(r"^<!-- (?:rows|peers|facts|summary) ", page, re.MULTILINE)
    assert len(starts) == page.count("<!-- end -->") > 0


def test_rows_are_chosen_by_name(tmp_path: Path) -> None:
    """A table has the rows that match, with their ratios, and another run changes nothing more."""
    report = Report()
    report.add("base", 4.0, "GB/s")
    report.add("better", 2.0, "GB/s", "base")
    report.add("other", 7.0, "ms")
    report.write_json(tmp_path / "a.json", {"date": "today"})
    page = rendered(PLAIN, tmp_path)
    assert "| better | 2 | GB/s | base | 0.50 |" in page
    assert "| other |" not in page
    assert "- date: today" in page
    assert rendered(page, tmp_path) == page


def test_missing_results_are_named(tmp_path: Path) -> None:
    """Without the file, or without such rows, the page says "Not measured yet."."""
    assert rendered(PLAIN, tmp_path).count("Not measured yet.") == 2
    (tmp_path / "a.json").write_text(json.dumps([{"facts": {}}]))
    assert "| what |" not in rendered(PLAIN, tmp_path)


def test_a_chart_has_a_bar_per_value() -> None:
    """Heights are proportional; a missing value has no bar; text is escaped."""
    chart = bar_chart("a < b", "GB/s", ["x", "y"], {"one": [1.0, None], "two": [2.0, 4.0]})
    root = ET.fromstring(chart)  # noqa: S314 - made above
    bars = [each for each in root.iter("{http://www.w3.org/2000/svg}rect") if each.get("fill", "") != "#fff"]
    heights = [float(bar.get("height", 0)) for bar in bars][2:]  # behind those of the legend
    assert len(heights) == 3
    assert heights[2] == pytest.approx(4 * heights[0], rel=0.01)
    assert "a < b" in [each.text for each in root.iter()]
