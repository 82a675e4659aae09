"""NUMA placement of the region.

By default the kernel places a page on the node of the thread that first touches the page. In the
server one thread backs the region, so all pages would be on one node. Therefore the huge pages of
the region are spread round-robin over all nodes, or over configured nodes.

`MPOL_INTERLEAVE` does not work for this. In shared memory it chooses the node of a huge page by the
number of the page's first small page. That number is always even, so with two nodes all huge pages
would be on the same node.
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
_MAX_NODES = 1024

_syscall = ctypes.CDLL(None, use_errno=True)["syscall"]
_syscall.restype = ctypes.c_long


def read_placement(text: str) -> tuple[int, ...] | None:
    """Parses the setting: None for "spread", () for "off", else nodes such as "1" or "0,2-3".

    Raises `ValueError` for other text; the caller puts "numa = x: " before the error text.
    """
    if text == "spread":
        return None
    if text == "off":
        return ()
    try:
        nodes = _read_list(text)
    except ValueError:
        nodes = ()
    if not nodes or nodes[-1] >= _MAX_NODES:
        raise ValueError('must be "spread", "off", or numbers of memory nodes like "0,2-3"')
    return nodes


def memory_nodes(sysfs: Path = _SYSFS) -> tuple[int, ...]:
    """The nodes that have memory and that this process may use; empty if unknown."""
    try:
        nodes = _read_list((sysfs / "has_memory").read_text().strip())
    except (OSError, ValueError):
        return ()
    allowed = _allowed()
    return tuple(node for node in nodes if allowed is None or node in allowed)


def choose_nodes(wanted: tuple[int, ...] | None, there: Sequence[int]) -> tuple[int, ...]:
    """The nodes over which the region is spread.

    Empty if the kernel decides, because ``wanted`` is empty or there is only one node. Raises
    `ValueError` for an unavailable node; the caller puts "numa = x: " before the error text.
    """
    if missing := sorted(set(wanted or ()) - set(there)):
        numbers = ", ".join(map(str, there)) or "none"
        raise ValueError(f"node {missing[0]} has no memory for this process; nodes that have memory: {numbers}")
    nodes = tuple(there) if wanted is None else wanted
    return nodes if len(there) > 1 else ()


def place(address: int, nbytes: int, node: int) -> None:
    """Makes the kernel place future pages of a range on a node, or on others if that node is full.

    The range must be page-aligned. In shared memory the setting applies to all processes that map
    it. Raises `OSError` if the kernel refuses or does not support NUMA.
    """
    if _MBIND is None:
        raise OSError(f"the number of the system call mbind is unknown on {platform.machine()}")
    words = (ctypes.c_ulong * (_MAX_NODES // 64))()
    words[node // 64] = 1 << node % 64
    result = _syscall(
        ctypes.c_long(_MBIND),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MPOL_PREFERRED),
        words,
        ctypes.c_ulong(_MAX_NODES + 1),  # the kernel ignores the last bit
        ctypes.c_long(0),
    )
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _allowed() -> frozenset[int] | None:
    """The nodes that this process's cgroups allow; None if unknown."""
    try:
        found = re.search(r"^Mems_allowed_list:\s*(\S+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return frozenset(_read_list(found[1])) if found else None
    except (OSError, ValueError):
        return None


def _read_list(text: str) -> tuple[int, ...]:
    """Parses the kernel's list format, such as "0-1,3"; raises `ValueError`."""
    nodes: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if not re.fullmatch(r"\d{1,4}(-\d{1,4})?", piece, re.ASCII):
            raise ValueError(text)
        nodes.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(nodes))
