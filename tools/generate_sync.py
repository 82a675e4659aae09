"""Generator of `client/sync.py` from `client/aio.py`, the hand-written source of both clients.

    python tools/generate_sync.py [--check]

Removes `async` and `await`, renames the asynchronous classes, and formats the result with ruff.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "client/aio.py"
TARGET = ROOT / "client/sync.py"

TOKENS = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\b__a(enter|exit)__", r"__\1__"),
    (r"\bAsync(Client|GrpcTransport|Iterator|Lease)\b", r"\1"),
    (r"\baio_transport\b", "sync_transport"),
    (r'"python-asyncio"', '"python"'),
)
"""(pattern, replacement). Each pattern must match at least once."""

SENTENCES = (
    (
        '"""Client for asyncio: `AsyncClient`. `Client` (sync.py) is generated from this file."""',
        '"""Synchronous client. Generated from aio.py by tools/generate_sync.py; do not edit."""',
    ),
    ("As an asynchronous context manager", "As a context manager"),
    ("local or remote, for asyncio.", "local or remote. Any thread may use it."),
    (
        """
    Construct the client on the event loop that uses it. A separate thread keeps the session open,
    even if the event loop is busy.
""",
        "",
    ),
    (" Takes up to two seconds, even if cancelled.", ""),
)
"""(sentence of `AsyncClient`, sentence of `Client`). The former must occur exactly once."""


def generate(source: str) -> str:
    """Returns the text of `client/sync.py`."""
    text = source
    for theirs, ours in SENTENCES:
        if text.count(theirs) != 1:
            raise SystemExit(f"{SOURCE.name}: expected exactly once: {theirs!r}")
        text = text.replace(theirs, ours)
    for pattern, replacement in TOKENS:
        text, count = re.subn(pattern, replacement, text)
        if not count:
            raise SystemExit(f"{SOURCE.name}: not found: {pattern}")
    if left := re.search(r"\b(?i:async|await)\w*", text):
        raise SystemExit(f"{SOURCE.name}: {left[0]!r} has no replacement")
    ruff = Path(sysconfig.get_path("scripts")) / "ruff"
    command = [str(ruff), "format", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def main() -> int:
    """Generates the file, or checks that it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the file is stale")
    options = parser.parse_args()
    text = generate(SOURCE.read_text())
    if not options.check:
        TARGET.write_text(text)
        return 0
    if TARGET.read_text() != text:
        print(f"{TARGET.relative_to(ROOT)} is stale (run `make fix`)")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
