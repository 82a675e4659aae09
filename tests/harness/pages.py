"""Code blocks of the documentation's pages: console, Python, TOML and JSON, with their marks.

By default a block runs beside a server that has served a request. A comment above it changes that:

    <!-- console: own server -->     starts servers itself
    <!-- console: no server -->      runs without a server
    <!-- console: needs vllm -->     not run; only its flags and files are checked
    <!-- python: needs a model -->   not run; only its syntax and names are checked
    <!-- python: from FILE -->       lines of a file that has its own tests
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Block", "blocks_of", "commands_of", "pages"]

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^( *)```(\w*)\s*$")
_MARK = re.compile(r"^<!-- (console|python|json|toml): (.+?) -->$")


@dataclass(frozen=True)
class Block:
    """One fenced block: position, language, mark ("" if it has none) and text."""

    page: str
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    found = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/README.md")]
    return sorted(found)


def blocks_of(page: Path) -> Iterator[Block]:
    """Yields the fenced blocks of a page.

    Raises `ValueError` for a mark that stands above none, or above another language's.
    """
    lines = page.read_text().splitlines()
    mark: re.Match[str] | None = None
    opened: tuple[int, str, str] | None = None
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if opened is not None:
            start, language, indent = opened
            if fence and not fence[2] and fence[1] == indent:
                text = "\n".join(text.removeprefix(indent) for text in lines[start : number - 1])
                yield Block(name, start, language, mark[2] if mark else "", text)
                opened, mark = None, None
        elif fence:
            opened = (number, fence[2], fence[1])
            if mark is not None and mark[1] != fence[2]:
                raise ValueError(f"{name}:{number}: marked as {mark[1]}, and is {fence[2] or 'nothing'}")
        elif found := _MARK.match(line):
            mark = found
        elif mark is not None and line.strip():
            raise ValueError(f"{name}:{number}: {mark[0]} stands above no block")
    if opened is not None:
        raise ValueError(f"{name}:{opened[0]}: a block without an end")


def commands_of(block: Block) -> list[str]:
    """The commands of a console block: the lines after `$ `, with continuation lines."""
    commands: list[str] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            commands.append(line[2:])
        elif commands and _is_open(commands[-1]):
            commands[-1] += f"\n{line}"
    return commands


def _is_open(command: str) -> bool:
    return command.rstrip().endswith(("\\", "|")) or command.count("'") % 2 == 1
