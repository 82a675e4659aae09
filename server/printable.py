"""Escapes of text for people: a name that a client chose can contain control characters."""

from __future__ import annotations

import re

__all__ = ["printable"]

_NO_GLYPH = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters without a glyph that `str.isprintable` accepts: Unicode's Default_Ignorable."""


def printable(text: str) -> str:
    r"""Replaces each character that could change or hide other text by its escape, like `\x1b`.

    These are control characters (C0, C1, newlines), format characters (bidi controls, zero-width
    characters), unusual spaces, and characters that Unicode has not assigned.
    """
    if text.isprintable() and not _NO_GLYPH.search(text):
        return text
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character.isprintable() and not _NO_GLYPH.match(character):
        return character
    return character.encode("unicode_escape").decode()
