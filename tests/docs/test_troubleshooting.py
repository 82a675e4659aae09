"""docs/troubleshooting.md covers all reasons, exceptions and alerts and quotes real log texts."""

from __future__ import annotations

import re
from pathlib import Path

from kvtier.client import errors
from kvtier.client.errors import KVTierError
from kvtier.client.session import reconnect
from kvtier.protos.error_reasons import STATUS_OF
from kvtier.protos.v1 import admin_pb2

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
PACKAGES = ("client", "cuda", "protos", "server", "tiers")
RULES = ROOT / "dashboards" / "rules"

FOREIGN_TEXTS = {"Permission denied", "timed out before receiving SETTINGS frame"}
"""Quoted texts of the kernel and of gRPC."""


def _section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return found[1]


def test_every_miss_reason_has_a_row() -> None:
    """The table has one row per miss reason and no other rows."""
    reasons = {name.removeprefix("MISS_REASON_").lower() for name in admin_pb2.MissReason.keys()} - {"unspecified"}  # noqa: SIM118
    assert set(re.findall(r"^\| `(\w+)` \|", _section("Misses by reason"), re.MULTILINE)) == reasons


def test_every_error_reason_has_a_row() -> None:
    explained = set(re.findall(r"^\| `(\w+)` \|", _section("Errors by reason"), re.MULTILINE))
    assert set(STATUS_OF) - explained == set()


def test_every_exception_has_a_row_with_its_reasons() -> None:
    """Every leaf class of `KVTierError` has one row that lists exactly its reasons."""
    raised = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, KVTierError)]
    leaves = {value.__name__: set[str]() for value in raised if not {*value.__subclasses__()} & {*raised}}
    for reason, error in errors.ERROR_OF.items():
        leaves[error.__name__].add(reason)
    rows = re.findall(r"^\| `([A-Z][a-z]\w+)` \|(.*?)\|", _section("Errors by reason"), re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", reasons)) for name, reasons in rows} == leaves
    assert len(rows) == len(leaves)


def test_a_session_without_shared_memory_is_explained() -> None:
    """A row quotes the client's log text."""
    assert f'| "{reconnect._NOT_SHARED.removesuffix(" (shared_memory)")}" |' in _section(
        "An engine does not find the server"
    )


def test_alerts_and_paragraphs_match() -> None:
    """Each alert has a heading with its name as anchor, and each such heading has an alert."""
    names = re.findall(
        r"^\s*- alert: (\w+)$", "\n".join(file.read_text() for file in RULES.glob("*.yml")), re.MULTILINE
    )
    anchors = {re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower() for name in names}
    assert set(re.findall(r"^### (kvtier-[a-z-]+)$", PAGE, re.MULTILINE)) == anchors


def test_quoted_texts_are_in_the_source() -> None:
    """Quoted texts in table rows occur in the source, so a search for a log line finds its row."""
    source = "".join(file.read_text() for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # joins string literals that span lines
    quoted = re.findall(r'"([^"`]+)"', "\n".join(line for line in PAGE.splitlines() if line.startswith('| "')))
    assert len(quoted) > 20
    assert [text for text in quoted if text not in source and text not in FOREIGN_TEXTS] == []
