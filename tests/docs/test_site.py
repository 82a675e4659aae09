"""The documentation as a whole: links, navigation, metric names, generated pages, site."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness.pages import ROOT, pages

OTHER_IDENTIFIERS = {"kvtier_tier"}
"""Identifiers that look like metric names."""

MKDOCS = ROOT / "build" / "docs" / "bin" / "python"
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, in the form that GitHub and mkdocs generate."""
    text = _CODE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _all_pages() -> list[Path]:
    return [*pages(), *sorted((ROOT / "docs" / "decisions").glob("*.md"))]


@pytest.mark.parametrize("page", _all_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    """Each relative link points to a file of the repository and to an existing heading."""
    broken = []
    for target in _LINK.findall(_CODE.sub("", page.read_text())):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            broken.append(target)
    assert broken == []


def test_navigation_lists_every_page_once() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"[\w-]+\.md", str(settings["nav"]))
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_index_lists_every_decision_once() -> None:
    """With its number and its title."""
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^\| \[(.+)\]\((.+?)\)", (folder / "README.md").read_text(), re.MULTILINE)
    titles = [(page.read_text().splitlines()[0].removeprefix("# "), page.name) for page in folder.glob("0*.md")]
    assert sorted(listed) == sorted(titles)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_mentioned_metric_exists(page: Path) -> None:
    """docs/metrics.md lists the metric or its prefix. Metrics of engines (`vllm:`) are exempt."""
    known = set(re.findall(r"`(kvtier_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    named = {
        name.rstrip("_") for name in re.findall(r"(?<!vllm:)\b(kvtier_[a-z_]+)", page.read_text())
    } - OTHER_IDENTIFIERS
    families = {re.sub(r"_(count|sum|bucket)$", "", name) for name in named}
    assert sorted(name for name in families if not any(found.startswith(name) for found in known)) == []


def test_generated_pages_are_up_to_date() -> None:
    """If this fails, run `make generate`."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "write_docs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not MKDOCS.exists(), reason="`make docs` installs mkdocs")
def test_site_builds_without_external_resources(tmp_path: Path) -> None:
    """A strict build succeeds, and no page loads a resource from another host."""
    done = subprocess.run(
        [MKDOCS, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [
        f"{page.name}: {url}"
        for page in (tmp_path / "site").rglob("*.html")
        for url in re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
    ]
    assert found == []
    assert (tmp_path / "site" / "troubleshooting.html").exists()
