"""Generator of the synchronous clients from the hand-written clients for asyncio.

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
CLIENT, CONVERSATIONS = "client/aio.py", "client/conversation_aio.py"
TARGETS = {CLIENT: "client/sync.py", CONVERSATIONS: "client/conversation_sync.py"}
"""Hand-written file -> generated file."""

TOKENS = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\b__a(enter|exit)__", r"__\1__"),
    (r"\bAsync(Client|ConversationClient|GrpcTransport|Iterator|Lease|ServiceTransport)\b", r"\1"),
    (r"\baio_transport\b", "sync_transport"),
    (r'"python-asyncio"', '"python"'),
)
"""(pattern, replacement). Each pattern must match at least once in one of the files."""

SENTENCES = {
    CLIENT: (
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
    ),
    CONVERSATIONS: (
        (
            '"""Client of conversations for asyncio. Source of conversation_sync.py."""',
            '"""Client of conversations. Generated from conversation_aio.py by generate_sync.py."""',
        ),
        ("for agents and routers, for asyncio: acts", "for agents and routers: acts"),
        ("Construct the client on the event loop that uses it.", "Any thread may use the client."),
    ),
}
"""Hand-written file -> (its sentence, sentence of the generated file). The former occurs once."""


def generate(path: str, source: str) -> str:
    """Returns the text of the file that is generated from `source`, the text of `path`."""
    text = source
    for theirs, ours in SENTENCES[path]:
        if text.count(theirs) != 1:
            raise SystemExit(f"{path}: expected exactly once: {theirs!r}")
        text = text.replace(theirs, ours)
    for pattern, replacement in TOKENS:
        text = re.sub(pattern, replacement, text)
    if left := re.search(r"\b(?i:async|await)\w*", text):
        raise SystemExit(f"{path}: {left[0]!r} has no replacement")
    ruff = Path(sysconfig.get_path("scripts")) / "ruff"
    command = [str(ruff), "format", "--stdin-filename", str(ROOT / TARGETS[path]), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def main() -> int:
    """Generates the files, or checks that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is stale")
    options = parser.parse_args()
    sources = {path: (ROOT / path).read_text() for path in TARGETS}
    for pattern, _ in TOKENS:
        if not any(re.search(pattern, source) for source in sources.values()):
            raise SystemExit(f"not found: {pattern}")
    stale = []
    for path, source in sources.items():
        text, target = generate(path, source), ROOT / TARGETS[path]
        if not options.check:
            target.write_text(text)
        elif target.read_text() != text:
            stale.append(TARGETS[path])
            print(f"{TARGETS[path]} is stale (run `make fix`)")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
