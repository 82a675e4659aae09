"""Which releases of vLLM this adapter knows. Pure: it is asked before anything of vLLM is imported."""

from __future__ import annotations

import re

__all__ = ["SUPPORTED", "is_known", "refuse_text", "release_of", "unknown_text"]

Release = tuple[int, int]

_KNOWN: tuple[Release, ...] = ((0, 32), (0, 33))
SUPPORTED = "vLLM 0.32 and 0.33"


def release_of(version: str) -> Release | None:
    """Returns major and minor; None for a build that does not say, like one from a checkout without tags ("0.1.dev7+g…")."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or version.startswith("0.1.dev"):
        return None
    return int(match[1]), int(match[2])


def is_known(version: str) -> bool:
    """Whether the adapter is tested with this release."""
    return release_of(version) in _KNOWN


def refuse_text(version: str, reason: str = "") -> str | None:
    """Returns why the connector cannot run in this vLLM: it is too old, or ``reason`` says what is missing; None where it may."""
    release = release_of(version)
    if not reason and (release is None or release >= _KNOWN[0]):
        return None
    return f"kvtier's connector works with {SUPPORTED}; this is vLLM {version}{f' ({reason})' if reason else ''}"


def unknown_text(version: str) -> str:
    """Returns what to say of a vLLM that is newer than what was tested, or does not say what it is."""
    return f"kvtier: this is vLLM {version}; the connector was made for {SUPPORTED}, and goes on: all that it needs is there"
