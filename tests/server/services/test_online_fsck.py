"""`kvtier fsck --online`: a server checks its own tiers while it serves."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import grpc
import pytest
from harness.launch import launch
from harness.payloads import assert_serves, filled, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.raw import refusal_of
from harness.server_process import MIB, ServerProcess
from harness.traffic import wait_connected

from kvtier.client import Client, DurableStatus, KeyStatus
from kvtier.protos.v1 import admin_pb2, admin_pb2_grpc
from kvtier.server.cli import main
from kvtier.server.rpc.sessions import namespace_spec
from kvtier.server.services import online_fsck
from kvtier.server.services.online_fsck import OnlineFsck
from kvtier.tiers.storage.fsck import Slice

pytestmark = pytest.mark.usefixtures("no_leaks")

PART = 256 << 10
NAMESPACE = namespace_of(PART)
NAMESPACE_ID = namespace_spec(NAMESPACE.to_proto()).id
KEYS = [key_of(number) for number in range(80)]
MISS = bytes([KeyStatus.MISS])
SLOWLY = 8 * MIB
"""Rate in bytes per second; a check of all blocks takes two and a half seconds."""


@pytest.fixture(params=["lmdb", "disk"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    """Yields a server whose secondary tier has all keys, and whose CPU tier is empty."""
    with ServerProcess(tmp_path, tier=request.param) as server:
        server.start()
        with connected(server) as client:
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            assert set(client.flush(KEYS)) == {DurableStatus.DURABLE}
        server.restart()
        yield server


def connected(server: ServerProcess) -> Client:
    client = Client(server.endpoint, namespace=NAMESPACE)
    wait_connected(client)
    return client


def damage(server: ServerProcess, *numbers: int) -> None:
    """Changes stored bytes of blocks while the server runs, as a failing disk might."""
    [path] = [path for name in ("data.mdb", "slab-00000") for path in server.data_dir.glob(f"*/{name}")][-1:]
    with path.open("r+b") as file:
        content = file.read()
        for number in numbers:
            at = content.index(payload(KEYS[number], PART)[1000:3000].tobytes())
            file.seek(at)
            file.write(b"\0\xff\0")


def fsck(server: ServerProcess, *arguments: str) -> int:
    return main(["fsck", "--online", "--endpoint", server.endpoint, *arguments])


def tier_of(server: ServerProcess) -> admin_pb2.TierStatus:
    """Returns the status of the secondary tier."""
    return server.status().tiers[1]


class Running:
    """A slow check that runs as a separate program."""

    def __init__(self, server: ServerProcess, rate: int = SLOWLY, *, repair: bool = False) -> None:
        self.channel = grpc.insecure_channel(server.endpoint)
        request = admin_pb2.FsckRequest(repair=repair, max_rate_bytes=rate)
        self.call = admin_pb2_grpc.AdminServiceStub(self.channel).Fsck(request)
        self.first: admin_pb2.FsckResponse = next(self.call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.call.cancel()
        self.channel.close()


def test_sound_tiers_exit_with_0(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """The output has the number of their blocks."""
    assert fsck(server) == 0
    assert capsys.readouterr().out == f"{tier_of(server).name}: 80 blocks, 20.0 MiB, none damaged\n"


def test_damage_and_repair(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage exits with 1 and stays.

    With --repair with 3, and lookups miss those blocks from then on.
    """
    damage(server, 7, 70)
    assert fsck(server) == 1
    assert (tier_of(server).blocks, tier_of(server).damaged_blocks) == (80, 0)
    capsys.readouterr()
    assert fsck(server, "--repair") == 3
    *found, summary = capsys.readouterr().out.splitlines()
    name = tier_of(server).name
    line = "{}: {} {}: its bytes are not those that were stored, quarantined".format
    assert sorted(found) == sorted(line(name, NAMESPACE_ID.hex(), KEYS[number].hex()) for number in (7, 70))
    assert summary == f"{name}: 80 blocks, 20.0 MiB, 2 damaged"
    assert (tier_of(server).blocks, tier_of(server).damaged_blocks) == (78, 2)
    assert tier_of(server).used_bytes == 78 * PART
    with connected(server) as client:
        for number in (7, 70):
            assert client.lookup([KEYS[number]]).statuses == MISS
        assert_serves(client, [key for number, key in enumerate(KEYS) if number not in (7, 70)])
        assert fsck(server, "--repair") == 0
        client.store([KEYS[7]], [payload(KEYS[7], PART)])
        assert client.flush([KEYS[7]]) == bytes([DurableStatus.DURABLE])
    server.restart()
    with connected(server) as client:
        assert_serves(client, [KEYS[7]])
        assert client.lookup([KEYS[70]]).statuses == MISS
        assert fsck(server) == 0


def test_a_load_of_a_damaged_block_is_a_miss(server: ServerProcess) -> None:
    """The block is counted and quarantined, and may be stored again."""
    damage(server, 7)
    with connected(server) as client:
        assert client.load([KEYS[7]], filled(1, PART), wait=30) == 0
        assert client.lookup([KEYS[7]]).statuses == MISS
        assert (tier_of(server).blocks, tier_of(server).damaged_blocks) == (79, 1)
        assert fsck(server) == 0
        client.store([KEYS[7]], [payload(KEYS[7], PART)])
        assert client.flush([KEYS[7]]) == bytes([DurableStatus.DURABLE])
        server.restart()
    with connected(server) as client:
        assert_serves(client, KEYS)


def test_json_is_one_document(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Its format is that of an offline check."""
    damage(server, 3)
    assert fsck(server, "--json", "--tier", tier_of(server).name) == 1
    answer = json.loads(capsys.readouterr().out)
    [tier] = answer["tiers"]
    assert (answer["exit_code"], tier["blocks"], tier["bytes"], tier["path"]) == (1, 80, 80 * PART, None)
    assert tier["findings"] == [
        {
            "namespace": NAMESPACE_ID.hex(),
            "key": KEYS[3].hex(),
            "bytes": PART,
            "problem": "its bytes are not those that were stored",
            "repaired": False,
        }
    ]


@pytest.mark.slow
def test_the_server_serves_during_a_check(server: ServerProcess) -> None:
    """Loads and stores continue, and only damaged blocks are found."""
    damage(server, 79)
    with Running(server, repair=True) as check, connected(server) as client:
        ended = threading.Event()
        steps = [check.first]

        def watch() -> None:
            steps.extend(check.call)
            ended.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        rounds = 0
        while not ended.is_set() or not rounds:
            assert_serves(client, KEYS[:79])
            # Few enough to fit without eviction, because an evicted block cannot be found.
            more = [key_of(number, salt=f"{rounds % 20}") for number in range(8)]
            client.store(more, [payload(key, PART) for key in more])
            assert_serves(client, more)
            rounds += 1
        watcher.join()
    print(f"{rounds} rounds, {len(steps)} steps")
    assert len(steps) > 2
    assert [finding.key for step in steps for finding in step.findings] == [KEYS[79]]
    assert steps[-1].done
    assert steps[-1].blocks >= 80
    assert not steps[-1].error


def test_a_second_check_is_refused(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """A client that disconnects ends its check."""
    with Running(server, MIB):
        assert fsck(server) == 4
        assert "another check of the tiers is running" in capsys.readouterr().err
        with pytest.raises(grpc.RpcError) as refused:
            Running(server)
        assert refusal_of(refused.value) == ("RESOURCE_EXHAUSTED", "FSCK_RUNNING")
    wait_until(lambda: fsck(server) == 0)


def test_sigterm_ends_a_running_check(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """The check reports it, and the server ends as fast as without a check."""
    codes: list[int] = []
    runner = threading.Thread(target=lambda: codes.append(fsck(server, "--rate", "1MiB")))
    runner.start()
    wait_until(lambda: "fsck begins" in server.log)
    began = time.monotonic()
    assert server.terminate() == 0
    print(f"ended in {time.monotonic() - began:.2f} s")
    runner.join()
    assert codes == [4]
    assert "it is shutting down" in capsys.readouterr().out
    assert "Traceback" not in server.log
    server.start()
    with connected(server) as client:
        assert_serves(client, KEYS)


@pytest.mark.parametrize("server", ["lmdb"], indirect=True)
def test_wrong_usage_is_refused(server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The error is one line, with the exit codes of the offline check."""
    assert fsck(server, "--tier", "nvme") == 4
    assert "there is no tier 'nvme' to check; tiers to check: lmdb" in capsys.readouterr().err
    assert fsck(server, "--rate", "fast") == 2
    assert "--rate fast: not a size" in capsys.readouterr().err
    assert fsck(server, "--config", "x.toml") == 2
    assert "--config cannot be used with --online" in capsys.readouterr().err
    assert main(["fsck", "--rate", "1MiB"]) == 2
    assert "--rate cannot be used without --online" in capsys.readouterr().err
    assert main(["fsck", "--online", "--endpoint", f"unix:{tmp_path}/none"]) == 2
    assert "no server answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        ("5", "5 B/s; did you mean 5MiB?"),
        ("0.5", "0 B/s; did you mean 0.5MiB?"),
        ("63 KiB", "63.0 KiB/s; did you mean 63MiB?"),
        ("64KiB", None),
        ("0", None),
    ],
)
def test_a_rate_without_a_unit_is_refused(
    rate: str, said: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A check that would never end is wrong usage; 0 means no limit."""
    assert main(["fsck", "--online", "--endpoint", f"unix:{tmp_path}/none", "--rate", rate]) == 2
    error = capsys.readouterr().err
    if said:
        assert error == f"kvtier: error: --rate {rate}: {said} It must be at least 64.0 KiB/s, or 0 for no limit\n"
    else:
        assert "no server answers" in error


def test_tiers_without_a_check_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With only a CPU tier there is nothing to check."""
    with launch(tmp_path, "--cpu-only") as server:
        server.wait_ready(backed=False)
        assert main(["fsck", "--online", "--endpoint", f"unix:{tmp_path}/s"]) == 0
        assert capsys.readouterr().out == "nothing to check: there is no tier below the CPU tier\n"


CHECKS = """
from harness.bad_tiers import BadTier
from kvtier.tiers.storage.fsck import Finding, Slice

class None_(BadTier):
    pass

class Raises(BadTier):
    def blocks_to_check(self):
        return 3

    def check_slice(self, after, *, repair):
        raise BaseException("odd")

class Nonsense(Raises):
    def check_slice(self, after, *, repair):
        return "all is well"
"""


def test_a_failing_check_of_a_tier_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier is named, also if its check returns an invalid result; others are checked."""
    (tmp_path / "checks.py").write_text(CHECKS)
    path = [str(tmp_path), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    config = tmp_path / "kvtier.toml"
    tables = [f'[[tiers]]\ntype = "checks:{name}"\nsize = "8MiB"\n' for name in ("None_", "Raises", "Nonsense")]
    config.write_text("".join(tables) + '[[tiers]]\ntype = "lmdb"\nsize = "64MiB"\n')
    with launch(tmp_path, "--config", str(config)) as server:
        server.wait_ready(backed=False)
        assert main(["fsck", "--online", "--endpoint", f"unix:{tmp_path}/s"]) == 4
        assert capsys.readouterr().out.splitlines() == [
            "none_: nothing to check: tiers of type bad cannot be checked",
            "raises: not checked: TierError: BaseException: odd",
            "nonsense: not checked: TierError: the check of the tier returned an invalid slice: 'all is well'",
            "lmdb: 0 blocks, 0 B, none damaged",
        ]
        assert server.end() == 0


async def test_checks_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each slice, and before the next check, the server rests longer than the work took."""
    clock, rests = 100.0, list[float]()

    class Tier:
        checkable: ClassVar[Any] = None
        type = name = "model"

        def blocks_to_check(self) -> int:
            return 3

        def check_slice(self, after: bytes, *, repair: bool) -> Slice:
            nonlocal clock
            clock += 2.0
            return Slice(None if after == b"2" else b"%d" % (int(after or b"0") + 1), 1, 1, ())

    async def pause(_: OnlineFsck, seconds: float) -> None:
        nonlocal clock
        rests.append(seconds)
        clock += max(0.0, seconds)

    async def run(_: int, work: Callable[[], Any]) -> Any:
        return work()

    Tier.checkable = Tier()
    runtime: Any = SimpleNamespace(
        tiers=[Tier.checkable], check=lambda number, work: asyncio.ensure_future(run(number, work))
    )
    sessions: Any = SimpleNamespace(refuse_if_draining=lambda: None)
    monkeypatch.setattr(OnlineFsck, "_pause", pause)
    monkeypatch.setattr(online_fsck, "time", SimpleNamespace(monotonic=lambda: clock))
    fsck = OnlineFsck(runtime, sessions)
    for _ in range(2):
        async for _progress in fsck.run([], repair=False, rate=0):
            pass
    rest = 2.0 * online_fsck._REST
    first, second = rests[:4], rests[4:]
    assert first[1:] == second[1:] == [rest] * 3
    assert first[0] <= 0.0
    assert second[0] == online_fsck._MAX_REST_SECONDS
