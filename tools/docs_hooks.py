"""Hook of mkdocs (mkdocs.yml): replaces links to files that are not part of the documentation site.

The site shows the name of such a file without a link. If the file does not exist in the repository,
the build fails.
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
    """Called by mkdocs. Returns the source of a page without links to files outside the site."""
    here = posixpath.dirname(f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda link: _replaced(link, here), markdown)


def _replaced(link: re.Match[str], here: str) -> str:
    path = posixpath.normpath(posixpath.join(here, link["target"].partition("#")[0]))
    if (path.startswith("docs/") and path.endswith(".md")) or link["target"].startswith("#"):
        return link[0]  # within the site: mkdocs checks such links
    if not (ROOT / path).exists():
        raise PluginError(f"{here}: {link[0]}: there is no {path}")
    text = link["text"]
    return text if path.rstrip("/") in text.replace("`", "") else f"{text} (`{path}`)"
