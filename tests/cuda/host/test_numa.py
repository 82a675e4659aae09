"""NUMA placement of the region."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier.cuda.host import numa, region
from kvtier.cuda.host.numa import choose_nodes, memory_nodes, place, read_placement
from kvtier.cuda.host.region import HUGE_PAGE_BYTES, HostRegion


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("spread", None), ("off", ()), ("1", (1,)), ("0,2-3", (0, 2, 3)), ("1,1", (1,))],
)
def test_settings(text: str, nodes: tuple[int, ...] | None) -> None:
    """All nodes, none, or some by number."""
    assert read_placement(text) == nodes


@pytest.mark.parametrize("text", ["", "all", "-1", "1-", "3-1", "1,", "0x1", "1024", "\u0663", "99999"])
def test_bad_settings(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        read_placement(text)


@pytest.mark.parametrize(
    ("listed", "nodes"), [("0\n", (0,)), ("0-1,4\n", (0, 1)), ("7\n", ()), ("\n", ()), ("what\n", ())]
)
def test_nodes_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, nodes: tuple[int, ...]
) -> None:
    """Nodes with memory come from sysfs, without those that cgroups forbid."""
    monkeypatch.setattr(numa, "_allowed", lambda: frozenset({0, 1}))
    (tmp_path / "has_memory").write_text(listed)
    assert memory_nodes(tmp_path) == nodes


def test_a_machine_without_sysfs(tmp_path: Path) -> None:
    """Without sysfs there are no nodes."""
    assert memory_nodes(tmp_path) == ()


def test_chosen_nodes() -> None:
    """All nodes by default, the configured nodes, or none if there is only one."""
    assert choose_nodes(None, (0, 1)) == (0, 1)
    assert choose_nodes((1,), (0, 1)) == (1,)
    assert choose_nodes((), (0, 1)) == ()
    assert choose_nodes(None, (0,)) == choose_nodes((0,), (0,)) == choose_nodes(None, ()) == ()
    with pytest.raises(ValueError, match="node 2 has no memory for this process; nodes that have memory: 0, 1"):
        choose_nodes((2,), (0, 1))


def test_huge_pages_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge pages are placed round-robin, for every split of the region into chunks."""
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(region, "place", lambda *what: asked.append(what))
    with HostRegion.create(5 * HUGE_PAGE_BYTES) as memory:
        memory.nodes = (3, 8)
        half = HUGE_PAGE_BYTES // 2
        memory.back(0, 3 * HUGE_PAGE_BYTES + half)
        memory.back(3 * HUGE_PAGE_BYTES + half, HUGE_PAGE_BYTES + half)
        where = [((address - memory.address) / HUGE_PAGE_BYTES, nbytes, node) for address, nbytes, node in asked]
    full = HUGE_PAGE_BYTES
    assert where == [(0, full, 3), (1, full, 8), (2, full, 3), (3, half, 8), (3.5, half, 8), (4, full, 3)]


def test_the_kernel_places_pages() -> None:
    """The kernel places pages on the first node."""
    there = memory_nodes()
    if not there:
        pytest.skip("the kernel knows no memory nodes")
    with HostRegion.create(4 * HUGE_PAGE_BYTES) as memory:
        memory.nodes = there[:1]
        memory.back(0, memory.size_bytes)
        if memory.misplaced is not None and memory.misplaced.errno == 1:
            pytest.skip("this container may not ask for nodes")
        assert memory.misplaced is None
        maps = Path("/proc/self/numa_maps").read_text()
        line = next(line for line in maps.splitlines() if line.startswith(f"{memory.address:x} "))
        assert line.split()[1] == f"prefer:{there[0]}"
        assert set(re.findall(r"\bN(\d+)=", line)) == {str(there[0])}


def test_an_unknown_node() -> None:
    """`place` raises the kernel's error, and the region is backed all the same."""
    with HostRegion.create(HUGE_PAGE_BYTES) as memory:
        with pytest.raises(OSError, match="Invalid argument"):
            place(memory.address, memory.size_bytes, 1000)
        memory.nodes = (1000,)
        memory.back(0, memory.size_bytes)
        assert memory.misplaced is not None
        assert memory.populate(0, memory.size_bytes) == memory.size_bytes
