"""On which memory nodes of the machine the region lies.

A server with several sockets has memory at each of them. Left to itself the kernel places a page at whoever touches it
first: here always at the thread that backs the region, and so all of it at one socket, whose memory then serves all
engines. So the region is spread over the nodes, a huge page at each in turn, or lies where it is told to.

`MPOL_INTERLEAVE` is not used for that: in shared memory it counts small pages, and a huge page is placed by its first,
whose number is even: of two nodes it is always the same one.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["choose_nodes", "memory_nodes", "place", "read_placement"]

_SYSFS = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
_MPOL_PREFERRED = 1
_MOST_NODES = 1024

_syscall = ctypes.CDLL(None, use_errno=True)["syscall"]
_syscall.restype = ctypes.c_long


def read_placement(text: str) -> tuple[int, ...] | None:
    """Reads a setting: None for "spread", no node for "off", else nodes like "1" or "0,2-3".

    Raises `ValueError` whose message continues the sentence "numa = x: …".
    """
    if text == "spread":
        return None
    if text == "off":
        return ()
    try:
        nodes = _read_list(text)
    except ValueError:
        nodes = ()
    if not nodes or nodes[-1] >= _MOST_NODES:
        raise ValueError('must be "spread", "off", or numbers of memory nodes like "0,2-3"')
    return nodes


def memory_nodes(sysfs: Path = _SYSFS) -> tuple[int, ...]:
    """Returns the nodes that have memory and that this process may use; none where the kernel does not say."""
    try:
        nodes = _read_list((sysfs / "has_memory").read_text().strip())
    except (OSError, ValueError):
        return ()
    allowed = _allowed()
    return tuple(node for node in nodes if allowed is None or node in allowed)


def choose_nodes(wanted: tuple[int, ...] | None, there: Sequence[int]) -> tuple[int, ...]:
    """Returns the nodes to spread the region over; none where it is left to the kernel: there is but one node.

    Raises `ValueError` for a node that is not there; its message continues the sentence "numa = x: …".
    """
    if missing := sorted(set(wanted or ()) - set(there)):
        numbers = ", ".join(map(str, there)) or "none"
        raise ValueError(f"node {missing[0]} has no memory for this process; those that have: {numbers}")
    nodes = tuple(there) if wanted is None else wanted
    return nodes if len(there) > 1 else ()


def place(address: int, nbytes: int, node: int) -> None:
    """Has the pages of whole pages of memory that come from now on come from a node, or from others if that is full.

    In shared memory that holds for everybody who maps it. Raises `OSError` where the kernel refuses, or knows no nodes.
    """
    if _MBIND is None:
        raise OSError(f"mbind is not known on {platform.machine()}")
    words = (ctypes.c_ulong * (_MOST_NODES // 64))()
    words[node // 64] = 1 << node % 64
    result = _syscall(
        ctypes.c_long(_MBIND),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MPOL_PREFERRED),
        words,
        ctypes.c_ulong(_MOST_NODES + 1),  # the kernel leaves the last one out
        ctypes.c_long(0),
    )
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _allowed() -> frozenset[int] | None:
    """Returns the nodes that cgroups let this process use; None where that is not known."""
    try:
        found = re.search(r"^Mems_allowed_list:\s*(\S+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return frozenset(_read_list(found[1])) if found else None
    except (OSError, ValueError):
        return None


def _read_list(text: str) -> tuple[int, ...]:
    """Reads what the kernel writes as "0-1,3"; raises `ValueError`."""
    nodes: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if not re.fullmatch(r"\d{1,4}(-\d{1,4})?", piece, re.ASCII):
            raise ValueError(text)
        nodes.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(nodes))
