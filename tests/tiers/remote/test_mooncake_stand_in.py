"""The tier `mooncake` with its real client process and a stand-in for Mooncake."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from contracts.shared_tier import KeyValueContract, checked
from contracts.tier import CORRUPT, DONE, FAILED, KIB, SPACE, content, empty, fetch, full, held, key
from harness.mooncake_master import PACKAGE, MooncakeMaster
from harness.polling import wait_until

from kvtier.cuda.host.region import HostRegion
from kvtier.tiers.remote import mooncake_process
from kvtier.tiers.remote.mooncake import MooncakeStore, MooncakeTier, codes_in
from kvtier.tiers.remote.mooncake_process import MooncakeProcess, MooncakeSettings
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.object_store import StoreUnavailableError
from kvtier.tiers.remote.value_codec import name_of
from kvtier.tiers.secondary_tier import BlockBytes, TierOpenError

PATIENT = RemoteLimits(deadline_seconds=20.0)


@pytest.fixture(autouse=True)
def master(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeMaster]:
    """A master that has not started."""
    request.getfixturevalue("no_leaks")
    monkeypatch.syspath_prepend(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(PACKAGE), os.environ.get("PYTHONPATH")))))
    monkeypatch.setattr(mooncake_process, "SUSPECT_SECONDS", 0.5)
    master = MooncakeMaster()
    yield master
    master.end()


@pytest.fixture
def tier(master: MooncakeMaster) -> Iterator[MooncakeTier]:
    master.start()
    tier = MooncakeTier("far", 1 << 30, master=master.address, limits=PATIENT)
    yield tier
    tier.close()


class TestMooncakeStandIn(KeyValueContract):
    smallest_value = 1

    @pytest.fixture(autouse=True)
    def _master(self, master: MooncakeMaster) -> None:
        self.master = master
        self.is_up = False

    def start_store(self, directory: Path) -> None:
        self.master.start()
        self.is_up = True

    def kill_store(self) -> None:
        self.master.answers.set()
        self.master.kill()
        self.is_up = False

    def make_tier(self, limits: RemoteLimits) -> MooncakeTier:
        """Returns a tier whose process is ready, if the store is."""
        tier = MooncakeTier("far", 1 << 30, master=self.master.address, limits=limits)
        if self.is_up:
            wait_until(lambda: checked(tier) is None)
        return tier

    def write(self, name: bytes, value: bytes) -> None:
        self.master.values[name.decode()] = value

    def read(self, name: bytes) -> bytes | None:
        return self.master.values.get(name.decode())

    def freeze(self, *, frozen: bool) -> None:
        self.master.answers.clear() if frozen else self.master.answers.set()

    def make_full(self) -> None:
        self.master.capacity_bytes = 0


def test_blocks_in_the_region_are_not_copied(tier: MooncakeTier) -> None:
    """Only headers are in other memory, if the block is not small."""
    with HostRegion.create(2 << 20) as region:
        tier.use_region(region.pools, region.address, region.size_bytes)
        slots = [region.memory[at : at + 256 * KIB] for at in range(0, 1024 * KIB, 256 * KIB)]
        block = BlockBytes(SPACE, key(1), tuple(slots[:2]))
        for part, data in zip(block.parts, content(1, (256 * KIB,) * 2), strict=True):
            part[:] = data
        assert tier.store([block]) == [DONE]
        into = BlockBytes(SPACE, key(1), tuple(slots[2:]))
        assert tier.load([into]) == [DONE]
        assert held(into) == content(1, (256 * KIB,) * 2)
        [client] = tier._clients
        assert client._staging.nbytes == mmap.PAGESIZE  # type: ignore[attr-defined]
        tier.close()
        del block, into, part
        slots.clear()


def test_a_lack_of_descriptors_fails_one_job(tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next job gets its staging memory."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", Mock(side_effect=OSError(errno.EMFILE, "too many open files")))
        with pytest.raises(OSError, match="too many"):
            tier.store([full(key(1), [b"block"])])
    assert tier.store([full(key(1), [b"block"])]) == [DONE]
    assert fetch(tier, key(1), (5,)) == (b"block",)


def test_an_old_value_is_replaced_after_its_first_load(tier: MooncakeTier, master: MooncakeMaster) -> None:
    """Mooncake keeps the value of an existing key and reports success."""
    name = name_of(SPACE, key(1)).decode()
    master.values[name] = b"planted"
    assert tier.store([full(key(1), [b"block"])]) == [DONE]
    assert master.values[name] == b"planted"
    assert tier.load([empty(key(1), (5,))]) == [CORRUPT]
    assert tier.store([full(key(1), [b"block"])]) == [DONE]
    assert fetch(tier, key(1), (5,)) == (b"block",)


def test_late_lookups_do_not_end_transfers(master: MooncakeMaster) -> None:
    """They leave their thread behind; the process goes on. A late load ends it."""
    master.start()
    tier = MooncakeTier("far", 1 << 30, master=master.address, limits=RemoteLimits(deadline_seconds=0.5))
    try:
        wait_until(lambda: checked(tier) is None)
        assert tier.store([full(key(1), [b"x"])]) == [DONE]
        first = tier._process._child
        master.answers.clear()
        assert tier.lookup([(SPACE, key(1))]) == [False]
        assert tier._process._child is first
        master.answers.set()
        wait_until(lambda: tier.lookup([(SPACE, key(1))]) == [True])
        assert tier._process._child is first
        master.answers.clear()
        assert tier.load([empty(key(1), (1,))]) == [FAILED]
        assert tier._process._child is not first
    finally:
        master.answers.set()
        tier.close()


def test_a_crash_of_the_client_is_a_miss(tier: MooncakeTier) -> None:
    assert tier.store([full(key(1), [b"x"])]) == [DONE]
    child = tier._process._child
    assert child
    assert child._process
    child._process.kill()
    child.thread.join()
    assert fetch(tier, key(1), (1,)) == (b"x",)


class Lies(MooncakeStore):
    """A client whose process answers each call with these codes."""

    def __init__(self, codes: dict[str, list[int]]) -> None:
        super().__init__(MooncakeProcess(MooncakeSettings("host:1")), 1.0)
        self.codes = codes
        self.calls: list[str] = []

    def _call(self, call: str, names: Sequence[bytes], places: object) -> list[int]:
        self.calls.append(call)
        return (self.codes[call] * len(names))[: len(names)]


def pieces(count: int) -> list[list[memoryview]]:
    return [[memoryview(bytearray(10))] for _ in range(count)]


def test_an_error_of_one_name_is_a_miss_of_this_name() -> None:
    """Also in a lookup. If all names have errors, the node does not answer."""
    names = [b"a", b"b", b"c"]
    store = Lies({"exist": [1, -600, 0], "get": [10, -900, -704]})
    assert store.exists(names) == [True, False, False]
    assert store.get(names, pieces(3), 1.0) == [10, None, None]
    store.codes = {"exist": [-1], "get": [-900]}
    for call in (lambda: store.exists(names), lambda: store.get(names, pieces(3), 1.0)):
        with pytest.raises(StoreUnavailableError):
            call()
    store.close()


def test_sizes_that_lie_cost_a_bounded_number_of_calls() -> None:
    """One call for all sizes, and at most 16 for values of other sizes."""
    names = [b"%d" % number for number in range(1000)]
    store = Lies({"get": [3], "size": [7]})
    sizes = store.get(names, pieces(1000), 1.0)
    assert sizes == [7] * 16 + [None] * 984
    assert store.calls == ["get", "size"] + ["get"] * 16
    store.codes = {"get": [-800], "size": [1 << 60]}
    assert store.get(names[:2], pieces(2), 1.0) == [1 << 60] * 2
    store.close()


@pytest.mark.parametrize("answer", [b"", b"{}", b"[1]", b"[1, 2, 3]", b'[1, "2"]', b"[1, true]", b"[1, 2.5]", b"[1, 2"])
def test_answers_of_the_process_have_a_code_for_each_name(answer: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - also those of json
        codes_in(answer, 2)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_process.importlib.util, "find_spec", lambda _: None)  # type: ignore[attr-defined]
    with pytest.raises(TierOpenError, match="kvtier\\[mooncake\\]"):
        MooncakeTier("far", 1 << 30, master="host:1", limits=PATIENT)


@pytest.mark.parametrize("master_address", ["", "host", "host:", ":50051", "host:x", "host:70000"])
def test_an_invalid_address_of_the_master(master_address: str) -> None:
    with pytest.raises(TierOpenError, match="HOST:PORT"):
        MooncakeTier("far", 1 << 30, master=master_address, limits=PATIENT)
