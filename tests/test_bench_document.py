"""The page about performance says what the committed results say."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench.document import PAGE, RESULTS, rendered
from bench.report import Report

PLAIN = "# Page\n\n<!-- rows a.json ^b -->\n<!-- end -->\n\n<!-- facts a.json -->\n<!-- end -->\n"


def test_the_page_is_that_of_the_results() -> None:
    """Whoever types a figure, or commits results without `make performance`, is told so."""
    page = PAGE.read_text()
    assert page == rendered(page, RESULTS)


def test_every_table_has_its_end() -> None:
    """A place whose end is missing would never be filled."""
    page = PAGE.read_text()
    starts = re.findall(r"^<!-- (?:rows|peers|facts) ", page, re.MULTILINE)
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


def test_what_was_not_measured_is_said_to_be_so(tmp_path: Path) -> None:
    """Without the file, or without such rows, there is no table."""
    assert rendered(PLAIN, tmp_path).count("Not measured yet.") == 2
    (tmp_path / "a.json").write_text(json.dumps([{"facts": {}}]))
    assert "| what |" not in rendered(PLAIN, tmp_path)
