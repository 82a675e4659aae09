"""The host region: sealed, shared, backed in the background, unmapped with its last view."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cuda.host import region as region_module
from kvtier.cuda.host.memory import available_bytes, tune_malloc
from kvtier.cuda.host.region import (
    DIGEST_PAGE_BYTES,
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    POOL_ALIGNMENT,
    HostRegion,
    Pool,
    RegionError,
)

SIZE = 2 * HUGE_PAGE_BYTES
TABLE = SIZE // DIGEST_PAGE_BYTES * 8
"""Bytes of the digests behind the region."""


@pytest.fixture
def region() -> Iterator[HostRegion]:
    """A region of two huge pages."""
    with HostRegion.create(SIZE, name="kvtier-test") as made:
        yield made


def mappings() -> list[str]:
    """Mappings of test regions in this process."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "kvtier-test" in line]


def descriptors() -> int:
    """Number of open descriptors of test regions."""
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of this listing or of another thread
            targets.append(str(entry.readlink()))
    return sum("kvtier-test" in target for target in targets)


def test_create(region: HostRegion) -> None:
    """A new region is writable, zero, of the requested size, owner-only and closed on exec."""
    assert region.memory.nbytes == region.size_bytes == SIZE
    assert region.memory.format == "B"
    assert not region.memory.readonly
    assert bytes(region.memory[-4:]) == bytes(4)
    assert os.fstat(region.pools[0].fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(region.pools[0].fd)
    assert region.address % HUGE_PAGE_BYTES == 0


def test_size_is_sealed(region: HostRegion) -> None:
    """The size cannot change, so access cannot end in SIGBUS; the seal cannot be removed."""
    for size in (SIZE - PAGE_BYTES, SIZE + PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(region.pools[0].fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.pools[0].fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("size", [0, -PAGE_BYTES, PAGE_BYTES + 1])
def test_odd_sizes_are_refused(size: int) -> None:
    """A region has whole pages."""
    with pytest.raises(RegionError, match="multiple"):
        HostRegion.create(size)


def test_impossible_sizes_are_refused() -> None:
    """A failed mapping raises `RegionError` and leaks nothing."""
    with pytest.raises(RegionError):
        HostRegion.create(2**62, name="kvtier-test")
    assert descriptors() == 0


def test_attached_region_is_the_same_memory(region: HostRegion) -> None:
    """One side reads what the other writes."""
    with HostRegion.attach(region.pools, SIZE) as other:
        assert other.pools[0].fd != region.pools[0].fd
        other.memory[5:9] = b"abcd"
        assert bytes(region.memory[5:9]) == b"abcd"


def test_attaching_in_another_process(region: HostRegion) -> None:
    """A process that receives the descriptor shares the bytes."""
    region.memory[:3] = b"abc"
    program = (
        "import sys; from kvtier.cuda.host.region import HostRegion\n"
        "r = HostRegion.inherit(sys.argv[1], int(sys.argv[2])); r.memory[3:6] = bytes(r.memory[:3])\n"
    )
    text, fds = region.for_child
    subprocess.run([sys.executable, "-c", program, text, str(SIZE)], pass_fds=fds, check=True, timeout=60)
    assert bytes(region.memory[:6]) == b"abcabc"


def test_digests_are_behind_the_region(region: HostRegion) -> None:
    """One per page; they share no byte with the region, and `back` allocates their pages."""
    with HostRegion.attach(region.pools, SIZE) as other:
        assert len(other.digests) == SIZE // DIGEST_PAGE_BYTES
        region.digests[0], region.digests[-1] = 1, 2**64 - 1
        assert (other.digests[0], other.digests[1], other.digests[-1]) == (1, 0, 2**64 - 1)
        assert not any(region.memory)
        other.memory[SIZE - 1] = 7
        assert other.digests[0] == 1
    region.close()
    with pytest.raises(RegionError, match="closed"):
        _ = region.digests


def test_attach_checks_the_size(region: HostRegion) -> None:
    with pytest.raises(RegionError, match="announced"):
        HostRegion.attach(region.pools, SIZE - PAGE_BYTES)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL])
def test_attach_checks_the_seal(seals: int) -> None:
    """A descriptor that its owner could shrink is not mapped."""
    fd = os.memfd_create("kvtier-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE + TABLE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(RegionError, match="sealed"):
            HostRegion.attach([Pool(0, SIZE, fd)], SIZE)
    finally:
        os.close(fd)


def test_attach_checks_the_kind(tmp_path: Path) -> None:
    """Files on a disk and closed descriptors are refused."""
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE_BYTES))
    with path.open("r+b") as file:
        fd = file.fileno()
        with pytest.raises(RegionError):
            HostRegion.attach([Pool(0, PAGE_BYTES, fd)], PAGE_BYTES)
    with pytest.raises(RegionError):
        HostRegion.attach([Pool(0, PAGE_BYTES, fd)], PAGE_BYTES)


def test_back_allocates_zeroed_pages(region: HostRegion) -> None:
    """Backing allocates exactly the chunk, as zeros, and keeps written bytes."""
    region.memory[HUGE_PAGE_BYTES : HUGE_PAGE_BYTES + 4] = b"kept"
    before = os.fstat(region.pools[0].fd).st_blocks * 512
    assert before < HUGE_PAGE_BYTES
    region.back(0, HUGE_PAGE_BYTES)
    assert os.fstat(region.pools[0].fd).st_blocks * 512 == before + HUGE_PAGE_BYTES + TABLE // 2
    region.back(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
    assert os.fstat(region.pools[0].fd).st_blocks * 512 == SIZE + TABLE
    assert region.backed_bytes == SIZE
    assert bytes(region.memory[:HUGE_PAGE_BYTES]) == bytes(HUGE_PAGE_BYTES)
    assert bytes(region.memory[HUGE_PAGE_BYTES:]) == b"kept".ljust(HUGE_PAGE_BYTES, b"\0")


def test_back_counts_huge_pages(region: HostRegion) -> None:
    """`huge_bytes` equals the kernel's count for the mapping."""
    region.back(0, SIZE)
    fields = Path("/proc/self/smaps").read_text().split("kvtier-test", 1)[1].splitlines()
    mapped = next(int(line.split()[1]) * 1024 for line in fields if line.startswith("ShmemPmdMapped:"))
    assert region.huge_bytes == mapped


def test_back_without_huge_pages(region: HostRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MADV_COLLAPSE the pages are allocated all the same."""
    monkeypatch.setattr(region_module, "_MADV_COLLAPSE", 9999)
    region.back(0, SIZE)
    assert region.huge_bytes == 0
    assert os.fstat(region.pools[0].fd).st_blocks * 512 == SIZE + TABLE


def test_back_of_odd_chunks(region: HostRegion) -> None:
    """Chunks need not be aligned to huge pages; the edges get small pages."""
    region.back(PAGE_BYTES, SIZE - 2 * PAGE_BYTES)
    region.back(0, PAGE_BYTES)
    region.back(SIZE - PAGE_BYTES, PAGE_BYTES)
    assert os.fstat(region.pools[0].fd).st_blocks * 512 == SIZE + TABLE


@pytest.mark.parametrize(
    ("offset", "length"), [(-PAGE_BYTES, SIZE), (0, 0), (0, SIZE + PAGE_BYTES), (1, PAGE_BYTES), (0, 100)]
)
def test_back_checks_the_chunk(region: HostRegion, offset: int, length: int) -> None:
    with pytest.raises(RegionError, match="whole pages"):
        region.back(offset, length)


def test_back_stops_before_memory_is_gone(region: HostRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    """When memory is short, `back` raises before the out-of-memory killer acts."""
    monkeypatch.setattr(region_module, "available_bytes", lambda: SIZE)
    with pytest.raises(RegionError, match="not enough memory"):
        region.back(0, SIZE)
    assert os.fstat(region.pools[0].fd).st_blocks == 0


def test_populate_skips_unbacked_pages(region: HostRegion) -> None:
    """An attached process maps backed pages and allocates none."""
    region.back(0, HUGE_PAGE_BYTES)
    with HostRegion.attach(region.pools, SIZE) as other:
        assert other.populate(0, SIZE) == HUGE_PAGE_BYTES
    assert os.fstat(region.pools[0].fd).st_blocks * 512 == HUGE_PAGE_BYTES + TABLE // 2


def test_populate_maps_the_pages_behind_a_hole(region: HostRegion) -> None:
    for page in (0, 2 * PAGE_BYTES, SIZE - PAGE_BYTES):
        os.pwrite(region.pools[0].fd, b"x", page)
    backed = os.fstat(region.pools[0].fd).st_blocks * 512
    assert backed > PAGE_BYTES
    with HostRegion.attach(region.pools, SIZE) as other:
        assert other.populate(0, SIZE) == backed


def test_close_is_idempotent_and_releases_everything() -> None:
    """After `close` mapping and descriptor are gone, and access raises."""
    region = HostRegion.create(SIZE, name="kvtier-test")
    assert mappings()
    assert descriptors() == 1
    region.close()
    region.close()
    assert region.closed
    assert not mappings()
    assert descriptors() == 0
    for attempt in (
        lambda: region.memory,
        lambda: region.pools[0].fd,
        lambda: region.back(0, SIZE),
        lambda: region.populate(0, SIZE),
    ):
        with pytest.raises(RegionError, match="closed"):
            attempt()


@pytest.mark.parametrize("keep", [lambda memory: memory[16:32], memoryview])
def test_views_outlive_the_region(keep: object) -> None:
    """A view stays valid after `close`; the last view unmaps."""
    region = HostRegion.create(SIZE, name="kvtier-test")
    view = keep(region.memory)  # type: ignore[operator]
    region.close()
    view[:4] = b"abcd"
    assert bytes(view[:4]) == b"abcd"
    assert mappings()
    del view
    gc.collect()
    assert not mappings()
    assert descriptors() == 0


def test_forgotten_region_is_unmapped() -> None:
    """A region that is not closed is unmapped when it is garbage."""
    HostRegion.create(SIZE, name="kvtier-test")
    gc.collect()
    assert not mappings()


def test_close_while_backing() -> None:
    """Thread 1 backs, thread 2 closes.

    The running call keeps its mapping, the next one is refused.
    """
    region = HostRegion.create(32 * HUGE_PAGE_BYTES, name="kvtier-test")
    refused = threading.Event()
    started = threading.Event()

    def work() -> None:
        try:
            while True:
                region.back(0, region.size_bytes)
                started.set()
        except RegionError:
            refused.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(60)
    region.close()
    thread.join(60)
    assert refused.is_set()
    gc.collect()
    assert not mappings()
    assert descriptors() == 0


def test_available_memory_is_plausible() -> None:
    """Available memory is positive and at most the machine's."""
    available = available_bytes()
    assert available is not None
    assert 0 < available <= os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def test_cgroup_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest limit of the cgroup and its ancestors counts, minus usage, plus page cache."""
    from kvtier.cuda.host import memory

    (tmp_path / "cgroup").write_text("0::/pods/one\n")
    for group, limit in (("pods/one", "max"), ("pods", "1000000")):
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "memory.max").write_text(f"{limit}\n")
        (tmp_path / group / "memory.current").write_text("600000\n")
        (tmp_path / group / "memory.stat").write_text("anon 500000\ninactive_file 60000\nactive_file 40000\n")
    monkeypatch.setattr(memory, "_OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path)
    assert available_bytes() == 500000


def test_tune_malloc_may_be_repeated() -> None:
    assert tune_malloc() == tune_malloc()


def test_nothing_heavy_is_imported() -> None:
    """The server's side of shared memory imports neither numpy nor torch nor cuda-bindings."""
    program = (
        "import sys, kvtier.cuda.host.region, kvtier.cuda.host.copy, kvtier.cuda.host.memory\n"
        "import kvtier.cuda.device.copies\n"
        "assert not {'numpy', 'torch', 'grpc', 'cuda'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


POOLS = (0, 3 * POOL_ALIGNMENT, 4 * POOL_ALIGNMENT)
POOLED = 6 * POOL_ALIGNMENT + 3 * PAGE_BYTES
"""Size of a region with these pools, the last of which ends with a remainder."""


@pytest.fixture
def pooled() -> Iterator[HostRegion]:
    with HostRegion.create(POOLED, name="kvtier-test", pool_starts=POOLS) as made:
        yield made


def fill(region: HostRegion) -> None:
    """Writes the number of its pool to each page of a region and to each digest."""
    for number, (begin, end, _) in enumerate(region.pools, start=1):
        for offset in range(begin, end, PAGE_BYTES):
            region.memory[offset] = number
        for page in range(begin // DIGEST_PAGE_BYTES, end // DIGEST_PAGE_BYTES):
            region.digests[page] = number


class TestPools:
    def test_a_descriptor_has_the_bytes_of_its_pool(self, pooled: HostRegion) -> None:
        """It has no byte of another pool, and no room for more."""
        fill(pooled)
        for number, (begin, end, fd) in enumerate(pooled.pools, start=1):
            data = os.pread(fd, 2 * POOLED, 0)
            assert set(data) == {0, number}
            assert data[: end - begin : PAGE_BYTES] == bytes([number]) * ((end - begin) // PAGE_BYTES)
            digests = (end - begin) // DIGEST_PAGE_BYTES
            assert data[end - begin :][: 8 * digests : 8] == bytes([number]) * digests
            with pytest.raises(PermissionError):
                os.ftruncate(fd, len(data) + PAGE_BYTES)

    @pytest.mark.parametrize("number", range(len(POOLS)))
    def test_one_pool_is_mapped_at_its_place(self, pooled: HostRegion, number: int) -> None:
        fill(pooled)
        pool = pooled.pools[number]
        with HostRegion.attach([pool], POOLED) as own:
            assert (own.begin, own.end, own.size_bytes) == (pool.begin, pool.end, POOLED)
            assert own.memory[pool.begin] == own.digests[pool.begin // DIGEST_PAGE_BYTES] == number + 1
            own.memory[pool.end - 1] = 99
            assert pooled.memory[pool.end - 1] == 99
            for outside in (pool.begin - PAGE_BYTES, pool.end):
                with pytest.raises(RegionError, match="between"):
                    own.populate(outside, PAGE_BYTES)

    def test_another_pool_cannot_be_accessed(self, pooled: HostRegion) -> None:
        """An access outside of the mapped pool ends the process, as it would behind the region."""
        fill(pooled)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            faulthandler.disable()
            with HostRegion.attach([pooled.pools[1]], POOLED) as own:
                os._exit(own.memory[0])
        assert os.waitpid(child, 0)[1] & 0x7F == signal.SIGSEGV

    def test_a_child_process_maps_all(self, pooled: HostRegion) -> None:
        fill(pooled)
        text, fds = pooled.for_child
        program = (
            "import sys; from kvtier.cuda.host.region import HostRegion\n"
            "r = HostRegion.inherit(sys.argv[1], int(sys.argv[2]))\n"
            "for begin, end, _ in r.pools:\n"
            "    r.memory[end - 1] = r.memory[begin] + r.digests[begin // 4096] + 10\n"
        )
        subprocess.run([sys.executable, "-c", program, text, str(POOLED)], pass_fds=fds, check=True, timeout=60)
        assert [pooled.memory[pool.end - 1] for pool in pooled.pools] == [12, 14, 16]

    def test_rounds_back_all_pools(self, pooled: HostRegion) -> None:
        """Each pool gets its first bytes in the first round. In the end all pages are there."""
        rounds = list(pooled.rounds(POOL_ALIGNMENT, 2 * POOL_ALIGNMENT))
        assert rounds[0] == [(start, POOL_ALIGNMENT) for start in POOLS]
        chunks = sorted(chunk for each in rounds for chunk in each)
        assert [offset for offset, _ in chunks[1:]] == [offset + length for offset, length in chunks[:-1]]
        for offset, length in chunks:
            pooled.back(offset, length)
        assert pooled.backed_bytes == POOLED
        for _, _, fd in pooled.pools:
            assert os.fstat(fd).st_blocks * 512 == os.fstat(fd).st_size

    def test_a_chunk_of_several_pools(self, pooled: HostRegion) -> None:
        pooled.back(2 * POOL_ALIGNMENT, 3 * POOL_ALIGNMENT)
        with HostRegion.attach(pooled.pools, POOLED) as other:
            assert other.populate(0, POOLED) == 3 * POOL_ALIGNMENT

    @pytest.mark.parametrize("size", [POOLED + 1, (1 << 64) - PAGE_BYTES, 1 << 57])
    def test_a_region_of_an_impossible_size(self, pooled: HostRegion, size: int) -> None:
        """A server may announce any size. No memory of the client is mapped over."""
        with pytest.raises(RegionError, match="of a region"):
            HostRegion.attach([pooled.pools[1]], size)

    def test_a_pool_that_is_not_one_of_the_region(self, pooled: HostRegion) -> None:
        begin, end, fd = pooled.pools[1]
        for wrong in (
            Pool(begin, end + PAGE_BYTES, fd),
            Pool(begin + PAGE_BYTES, end + PAGE_BYTES, fd),
            Pool(POOLED, POOLED + end - begin, fd),
            Pool(end, begin, fd),
        ):
            with pytest.raises(RegionError, match="of a region"):
                HostRegion.attach([wrong], POOLED)
