"""The pages as a whole: every link leads somewhere, what is made from the code is so, and nothing comes from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness.pages import ROOT, pages

OTHER_NAMES = {"kvtier_tier"}
"""What only looks like a metric: a module of an adapter."""

MKDOCS = ROOT / "build" / "docs" / "bin" / "python"
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and mkdocs make them."""
    text = _CODE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _all_pages() -> list[Path]:
    return [*pages(), *sorted((ROOT / "docs" / "decisions").glob("*.md"))]


@pytest.mark.parametrize("page", _all_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file of the repository, and to a heading that it has."""
    broken = []
    for target in _LINK.findall(_CODE.sub("", page.read_text())):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            broken.append(target)
    assert broken == []


def test_every_page_can_be_found() -> None:
    """The navigation has all of them, once."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"[\w-]+\.md", str(settings["nav"]))
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_metric_that_is_named_exists(page: Path) -> None:
    """In the table that is made from the code, whole or as the beginning of a family; metrics of engines are their own."""
    known = set(re.findall(r"`(kvtier_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    named = {name.rstrip("_") for name in re.findall(r"(?<!vllm:)\b(kvtier_[a-z_]+)", page.read_text())} - OTHER_NAMES
    families = {re.sub(r"_(count|sum|bucket)$", "", name) for name in named}
    assert sorted(name for name in families if not any(found.startswith(name) for found in known)) == []


def test_what_is_made_from_the_code_is_as_the_code_says() -> None:
    """Else: `make docs-reference`."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "write_docs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not MKDOCS.exists(), reason="`make docs` installs mkdocs")
def test_the_site_is_built_and_asks_nothing_of_others(tmp_path: Path) -> None:
    """Strictly: a broken link or anchor is an error. No page loads a script, a style, a font or a picture of another host."""
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
