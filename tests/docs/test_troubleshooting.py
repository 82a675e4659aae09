"""The page on troubleshooting has a word for everything that kvtier can say, and quotes it as it is said."""

from __future__ import annotations

import re
from pathlib import Path

from kvtier.client import errors
from kvtier.client.session import connection
from kvtier.protos.error_reasons import STATUS_OF
from kvtier.protos.v1 import admin_pb2

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
ROOMS = ("client", "cuda", "protos", "server", "tiers")
RULES = ROOT / "dashboards" / "rules"

OF_THE_SYSTEM = {"Permission denied", "timed out before receiving SETTINGS frame"}
"""What is quoted and not ours, but the kernel's or gRPC's."""


def _section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_every_reason_of_a_miss_is_explained() -> None:
    """One row each, and none that does not exist."""
    reasons = {name.removeprefix("MISS_REASON_").lower() for name in admin_pb2.MissReason.keys()} - {"unspecified"}  # noqa: SIM118
    assert set(re.findall(r"^\| `(\w+)` \|", _section("Misses by reason"), re.MULTILINE)) == reasons


def test_every_reason_of_an_error_is_explained() -> None:
    """One row each."""
    explained = set(re.findall(r"^\| `(\w+)` \|", _section("Errors by reason"), re.MULTILINE))
    assert set(STATUS_OF) - explained == set()


def test_every_exception_is_explained() -> None:
    """One row each, with its reasons."""
    raised = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    leaves = {value.__name__: set[str]() for value in raised if not value.__subclasses__()}
    for reason, error in errors.ERROR_OF.items():
        leaves[error.__name__].add(reason)
    rows = re.findall(r"^\| `([A-Z][a-z]\w+)` \|(.*?)\|", _section("Errors by reason"), re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", reasons)) for name, reasons in rows} == leaves
    assert len(rows) == len(leaves)


def test_a_session_without_shared_memory_is_explained() -> None:
    """Where it is looked for: under what the client says."""
    assert f'| "{connection._NOT_SHARED.removesuffix(" (shared_memory)")}" |' in _section(
        "An engine does not find the server"
    )


def test_every_alert_has_its_paragraph() -> None:
    """Under its name, so that a rule can link to it; and no paragraph is of an alert that is gone."""
    names = re.findall(
        r"^\s*- alert: (\w+)$", "\n".join(file.read_text() for file in RULES.glob("*.yml")), re.MULTILINE
    )
    anchors = {re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower() for name in names}
    assert set(re.findall(r"^### (kvtier-[a-z-]+)$", PAGE, re.MULTILINE)) == anchors


def test_what_is_quoted_is_said() -> None:
    """Each text in quotes of the tables is in the source, so that searching the page for a line of the log finds it."""
    source = "".join(file.read_text() for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts that are written in several pieces
    quoted = re.findall(r'"([^"`]+)"', "\n".join(line for line in PAGE.splitlines() if line.startswith('| "')))
    assert len(quoted) > 20
    assert [text for text in quoted if text not in source and text not in OF_THE_SYSTEM] == []
