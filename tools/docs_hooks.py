"""Hook of mkdocs (mkdocs.yml): replaces links to files of the repository, which the site lacks.

On the site such a link becomes the name of the file. If the file does not exist, the build fails.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>(?!https?:|#|mailto:)[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the source of a page; returns it without links that leave the site."""
    here = posixpath.dirname(f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda link: _replaced(link, here), markdown)


def _replaced(link: re.Match[str], here: str) -> str:
    path = posixpath.normpath(posixpath.join(here, link["target"].partition("#")[0]))
    if (path.startswith("docs/") and path.endswith(".md")) or link["target"].startswith("#"):
        return link[0]  # within the site: mkdocs checks it
    if not (ROOT / path).exists():
        raise PluginError(f"{here}: {link[0]}: there is no {path}")
    text = link["text"]
    return text if path.rstrip("/") in text.replace("`", "") else f"{text} (`{path}`)"
