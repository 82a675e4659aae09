"""`kvtier bench --break-even` against a real server and a simulated engine."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.fake_prefill_engine import FakePrefillEngine
from harness.payloads import key_of, namespace_of, payload
from harness.server_process import MIB, ServerProcess
from rich.console import Console

from bench.breakeven import (
    BreakEvenError,
    ComputeTimes,
    Geometry,
    PrefillEngine,
    Proposal,
    RegressionLine,
    Report,
    TransferRig,
    TransferTimes,
    propose,
)
from bench.breakeven import __main__ as command
from bench.breakeven.report import show, to_json
from kvtier.client import Client, Group, GroupKind
from kvtier.protos.v1 import admin_pb2
from kvtier.server.commands import console

KV = ("--kv-bytes-per-token", "256")
GIVEN = ("--prefill-tokens-per-s", "5000")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Yields a server with a disk tier, which the benchmark must not write to."""
    with ServerProcess(tmp_path, region=32 * MIB) as process:
        yield process.start()


def bench(server: ServerProcess, *flags: str) -> int:
    return command.main(["--endpoint", server.endpoint, "--timeout", "20", *flags])


def told(capsys: pytest.CaptureFixture[str], server: ServerProcess, *flags: str) -> Any:
    """Returns the JSON that the command prints."""
    assert bench(server, "--json", *flags) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], server: ServerProcess, *flags: str) -> tuple[int, str]:
    """Returns exit code and error text of a command that fails."""
    code = bench(server, *flags)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvtier: error: ")
    assert captured.err.count("\n") == 1
    return code, captured.err.removeprefix("kvtier: error: ").rstrip()


def totals(server: ServerProcess) -> admin_pb2.HandoffTotals:
    """Returns the counts of ended holds; fails if a block, lease or hold of a run is left."""
    status = server.wait_for(lambda status: not status.sessions)
    assert (status.holds, status.leases, status.stores, status.quarantined_bytes) == (0, 0, 0, 0)
    assert [(tier.blocks, tier.used_bytes) for tier in status.tiers] == [(0, 0), (0, 0)]
    listed = server._admin.ListHandoffs(admin_pb2.ListHandoffsRequest())
    assert listed.held_bytes == 0
    found: admin_pb2.HandoffTotals = listed.totals[0]
    assert (found.open, found.expired, found.dropped) == (0, 0, 0)
    assert found.published == found.released
    return found


def samples_of(part: Any) -> dict[int, list[float]]:
    return {sample["tokens"]: sample["seconds"] for sample in part["samples"]}


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_transfers_are_measured_and_leave_nothing(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    """Each length is claimed in every round with its real bytes.

    The threshold follows from the timings.
    """
    report = told(capsys, server, *KV, *GIVEN, "--max-tokens", "1024", "--rounds", "4", "--transport", transport)
    lengths = [32, 64, 128, 256, 512, 1024]
    samples = samples_of(report["transfer"])
    assert {tokens: len(seconds) for tokens, seconds in samples.items()} == dict.fromkeys(lengths, 4)
    assert all(seconds > 0 for taken in samples.values() for seconds in taken)
    assert (report["transfer"]["transport"], report["transfer"]["kv_bytes_per_token"]) == (transport, 256)
    assert report["transfer"]["memcpy_bytes_per_second"] > 0
    assert report["compute"]["measured"] is False
    assert report["compute"]["tokens_per_second"] == pytest.approx(5000)
    expected = propose(samples, 1 / 5000, 16)
    assert report["kv_recompute_threshold"] == expected.threshold
    assert report["interval"] == {"low": expected.low, "high": expected.high, "share": 0.9}
    found = totals(server)
    assert (found.claimed, found.claimed_bytes) == (5 * len(lengths), 5 * 256 * sum(lengths))


def test_an_engine_is_measured_by_prompts(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round has a prompt of every length up to the engine's maximum.

    The rate uses its token counts.
    """
    with FakePrefillEngine(max_model_len=300, seconds_per_request=0.5, seconds_per_token=2**-10) as stand_in:
        monkeypatch.setattr(command, "PrefillEngine", functools.partial(PrefillEngine, clock=stand_in.clock))
        report = told(capsys, server, *KV, "--engine", stand_in.url, "--rounds", "3", "--max-tokens", "512")
        assert [len(prompt) for prompt in stand_in.prompts] == [16, 32, 64, 144, 288] * 4
        assert len({tuple(prompt[:16]) for prompt in stand_in.prompts}) == 20
    assert {tokens: len(seconds) for tokens, seconds in samples_of(report["compute"]).items()} == dict.fromkeys(
        [16, 32, 64, 144, 288], 3
    )
    assert report["longest_tokens"] == 288
    assert report["compute"]["tokens_per_second"] == pytest.approx(1024)
    assert report["compute"]["fixed_seconds"] == pytest.approx(0.5)
    assert report["compute"]["worst_miss"] == pytest.approx(0, abs=1e-9)
    expected = propose(samples_of(report["transfer"]), samples_of(report["compute"]), 16)
    assert report["kv_recompute_threshold"] == expected.threshold
    totals(server)


def test_a_slow_engine_always_pulls(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """If a token takes an hour to compute, any transfer is faster."""
    assert bench(server, *KV, "--prefill-tokens-per-s", "0.0003", "--max-tokens", "128", "--rounds", "3") == 0
    out = capsys.readouterr().out
    for piece in ("always worth it: kv_recompute_threshold = 0", "over shm", "256 B per token", ": 0 to 0"):
        assert piece in out


def test_the_block_size_comes_from_a_connected_engine(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """The groups are those of its namespace; its cached blocks stay."""
    namespace = namespace_of(16 * 512, 16 * 256, model="m/1")
    with Client(server.endpoint, namespace=namespace, engine_id="e") as engine:
        engine.wait_until_connected(60)
        key = key_of(1)
        engine.store([key], [payload(key, 16 * 512)])
        report = told(capsys, server, *GIVEN, "--max-tokens", "128", "--rounds", "3")
        assert (report["transfer"]["model"], report["transfer"]["kv_bytes_per_token"]) == ("m/1", 768)
        assert engine.lookup([key]).prefix_hits == 1
        assert refused(capsys, server, *GIVEN, "--model", "other") == (
            1,
            "no engine of other is connected to learn the size of KV from: give --kv-bytes-per-token",
        )


def test_groups_are_transferred_as_in_a_handoff(server: ServerProcess) -> None:
    """Every block of attention groups, and one block of a group of states."""
    geometry = Geometry((Group(1024, 16), Group(512, 32), Group(4096, 32, kind=GroupKind.STATE)))
    with Client(server.endpoint, namespace=TransferRig.namespace(geometry), engine_id="e") as client:
        client.wait_until_connected(60)
        with TransferRig(client, geometry) as rig:
            rig.fill(256, 1 << 20)
            assert rig.lengths == [32, 64, 128, 256]
            assert rig.nbytes == 256 // 32 * (2 * 1024 + 512) + 4096
            for _ in range(3):
                for tokens in rig.lengths:
                    rig.read(tokens)
    expected = sum(tokens // 32 * 2560 + 4096 for tokens in rig.lengths)
    assert totals(server).claimed_bytes == 3 * expected


def test_a_reset_during_the_benchmark_ends_it(server: ServerProcess) -> None:
    """The error says that the blocks were dropped, and nothing is left."""
    geometry = Geometry.given(256, 16)
    with Client(server.endpoint, namespace=TransferRig.namespace(geometry), engine_id="e") as client:
        client.wait_until_connected(60)
        with TransferRig(client, geometry) as rig:
            rig.fill(256, 1 << 20)
            rig.read(64)
            assert client.reset(wait=30) == 0
            with pytest.raises(BreakEvenError, match="has dropped what was to be measured"):
                rig.read(64)
    status = server.wait_for(lambda status: not status.sessions)
    assert (status.holds, status.tiers[0].blocks) == (0, 0)


@pytest.mark.parametrize(
    ("method", "number"), [("publish", 1), ("publish", 2), ("store", 1), ("claim", 2), ("release_holds", 1)]
)
def test_an_interrupt_leaves_nothing(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, method: str, number: int
) -> None:
    """Ctrl-C arrives after the server has executed a call and before the client has its answer."""
    geometry = Geometry.given(256, 16)
    with Client(server.endpoint, namespace=TransferRig.namespace(geometry), engine_id="e") as client:
        client.wait_until_connected(60)
        done, calls = getattr(client, method), itertools.count(1)

        def interrupted(*args: Any, **more: Any) -> Any:
            found = done(*args, **more)
            if next(calls) == number:
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(client, method, interrupted)
        with pytest.raises(KeyboardInterrupt), TransferRig(client, geometry) as rig:
            _fill_and_read(rig)
    totals(server)


def _fill_and_read(rig: TransferRig) -> None:
    rig.fill(256, 1 << 20)
    for _ in range(3):
        rig.read(64)


class TestLimits:
    def test_bytes_are_limited(self, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
        """By the flag, and by an eighth of the CPU tier."""
        for flags, longest in ((("--max-bytes", "100KiB"), 400), ((), 32 * MIB // 8 // 4096)):
            size = ("--kv-bytes-per-token", "256") if flags else ("--kv-bytes-per-token", "4KiB")
            report = told(capsys, server, *size, *GIVEN, "--rounds", "3", *flags)
            assert max(samples_of(report["transfer"])) == longest
        totals(server)

    @pytest.mark.parametrize(("part", "longest"), [(1 / 64, 2048), (1 / 1024, 128), (0, None)])
    def test_the_benchmark_halves_its_size_if_holds_are_declined(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: float, longest: int | None
    ) -> None:
        """It stops when the server holds the blocks, or when they are too few to measure."""
        with ServerProcess(tmp_path, region=32 * MIB, config=f"[handoff]\npart = {part}\n") as small:
            small.start()
            if longest is None:
                code, why = refused(capsys, small, *KV, *GIVEN)
                assert (code, why.startswith("two blocks (32 tokens, 8,192 bytes) are the least")) == (1, True)
            else:
                report = told(capsys, small, *KV, *GIVEN, "--rounds", "3")
                assert max(samples_of(report["transfer"])) == longest
            totals(small)


class TestRefusals:
    def test_an_unmeasurable_compute_rate_is_refused(
        self, server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If longer prompts take no longer, there is no proposal."""
        with FakePrefillEngine(seconds_per_request=0.5) as stand_in:
            monkeypatch.setattr(command, "PrefillEngine", functools.partial(PrefillEngine, clock=stand_in.clock))
            code, why = refused(capsys, server, *KV, "--engine", stand_in.url, "--max-tokens", "64")
        assert (code, why.startswith("what a token costs to compute is lost in the noise")) == (1, True)

    @pytest.mark.parametrize(
        ("flags", "why"),
        [
            ((), "the speed of prefill is missing: give either --engine or --prefill-tokens-per-s"),
            (
                (*GIVEN, "--engine", "http://127.0.0.1:1"),
                "the speed of prefill is missing: give either --engine or --pref",
            ),
            (("--prefill-tokens-per-s", "0"), "--prefill-tokens-per-s 0: must be more than 0"),
            (("--prefill-tokens-per-s", "nan"), "--prefill-tokens-per-s nan: must be more than 0"),
            (("--engine", "localhost:8000"), "--engine: 'localhost:8000' is no URL of an engine"),
            ((*GIVEN, "--kv-bytes-per-token", "lots"), "--kv-bytes-per-token lots: not a size"),
            ((*GIVEN, "--kv-bytes-per-token", "0"), "--kv-bytes-per-token 0: must be 1 or more"),
            ((*GIVEN, *KV, "--block-tokens", "-1"), "--block-tokens -1: must be 1 or more"),
            ((*GIVEN, *KV, "--block-tokens", "0"), "--block-tokens 0: must be 1 or more"),
            ((*GIVEN, "--block-tokens", "16"), "--block-tokens needs --kv-bytes-per-token"),
            ((*GIVEN, *KV, "--model", "m"), "give either --model or --kv-bytes-per-token"),
            ((*GIVEN, *KV, "--rounds", "2"), "--rounds 2: must be 3 or more"),
            ((*GIVEN, *KV, "--max-tokens", "0"), "--max-tokens 0: must be 1 or more"),
            ((*GIVEN, *KV, "--max-bytes", "1G"), "--max-bytes 1G: not a size"),
            ((*GIVEN, *KV, "--endpoint", "nonsense"), "'nonsense' is neither unix:PATH nor HOST:PORT"),
        ],
    )
    def test_wrong_usage(self, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], why: str) -> None:
        """A line gives the reason, the exit code is 2, and no server is called."""
        assert command.main([*flags]) == console.EXIT_USAGE
        captured = capsys.readouterr()
        assert (captured.out, captured.err.startswith(f"kvtier: error: {why}")) == ("", True), captured.err

    def test_an_unreachable_server_is_an_error(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The exit code is 2."""
        endpoint = f"unix:{tmp_path}/none"
        code = command.main(["--endpoint", endpoint, *KV, *GIVEN])
        assert (code, f"no server answers at {endpoint}" in capsys.readouterr().err) == (console.EXIT_UNREACHABLE, True)

    def test_an_unusable_engine_is_an_error(self, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
        """An unreachable engine gives exit code 2, one that refuses gives 1.

        The server is unchanged.
        """
        with FakePrefillEngine(refuse=400) as stand_in:
            code, why = refused(capsys, server, *KV, "--engine", stand_in.url, "--max-tokens", "64")
            assert (code, f"{stand_in.url}/v1/completions answers 400" in why) == (1, True)
        totals(server)
        code, why = refused(capsys, server, *KV, "--engine", stand_in.url)
        assert (code, "no engine answers at" in why) == (2, True)

    def test_an_engine_with_too_short_prompts_is_refused(
        self, server: ServerProcess, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Prompts of one or two blocks are too short to measure."""
        with FakePrefillEngine(max_model_len=20) as stand_in:
            code, why = refused(capsys, server, *KV, "--engine", stand_in.url, "--max-tokens", "64")
        assert (code, "takes prompts of 19 tokens at most" in why) == (1, True)


def report_of(threshold: int | None, low: int | None, high: int | None, *, measured: bool = True) -> Report:
    """Returns a report: memory 100 GB/s, transfers 10 GB/s, compute 5,000 tokens/s."""
    line = RegressionLine(0.002, 1e-6)
    transferred = TransferTimes(
        "shm",
        Geometry((Group(160_000, 16),), 2, "m/[1]"),
        {64: [0.002, 0.0021, 0.003], 4096: [0.006] * 3},
        line,
        0.04,
        1e11,
    )
    computed = ComputeTimes(
        {64: [0.05] * 3, 1024: [0.25] * 3} if measured else {}, RegressionLine(0.03 if measured else 0, 2e-4)
    )
    return Report(transferred, computed, Proposal(threshold, low, high))


class TestReport:
    @pytest.mark.parametrize(
        ("proposal", "pieces", "verdict"),
        [
            ((80, 64, 96), ["worth it from 80 tokens on: kv_recompute_threshold = 80", ": 64 to 96"], "from"),
            ((0, 0, 16), ["always worth it: kv_recompute_threshold = 0", ": 0 to 16"], "always"),
            ((None, 4096, None), ["never worth it", "leave bidirectional_kv_xfer off", ": 4,096 to never"], "never"),
            ((2048, 1008, 4096), ["= 2048", "beyond 1,024 tokens the result is extrapolated"], "from"),
        ],
    )
    def test_the_answer_is_a_threshold_or_never(
        self, proposal: tuple[int | None, ...], pieces: list[str], verdict: str
    ) -> None:
        """The text gives its uncertainty."""
        report = report_of(*proposal)  # type: ignore[arg-type]
        text = shown(report)
        for piece in (*pieces, "not in these figures: load by other engines"):
            assert piece in text
        assert ("beyond" in text) == any((limit or 0) > 1024 for limit in proposal)
        values = json.loads(to_json(report))
        assert (values["kv_recompute_threshold"], values["verdict"]) == (proposal[0], verdict)
        assert [values["interval"]["low"], values["interval"]["high"]] == list(proposal[1:])

    def test_the_report_lists_the_measurements(self) -> None:
        """Rates exclude fixed costs; a transfer is also given as a part of a copy in memory."""
        text = shown(report_of(80, 64, 96))
        for piece in (
            "KV of m/[1]: 9.8 KiB per token, 16 tokens per block, for each of 2 ranks",
            "transfer over shm: 2.00 ms and 1,000,000 tokens/s, 10 GB/s (0.10 of a copy in memory)",
            "compute: 30.0 ms, a cost that each request has anyway, and 5,000 tokens/s",
            "2.10 ms",
            "2.00-3.00",
        ):
            assert piece in text
        assert "compute: 5,000 tokens/s, as given" in shown(report_of(80, 64, 96, measured=False))

    def test_a_rate_below_the_noise_is_omitted(self) -> None:
        """JSON has null."""
        report = report_of(16, 0, 16)
        flat = TransferTimes(
            "shm", report.transferred.geometry, report.transferred.samples, RegressionLine(0.001, -1e-9), 0.5, 1e11
        )
        report = Report(flat, report.computed, report.proposal)
        assert "1.00 ms and no measurable time per token" in shown(report)
        transfer = json.loads(to_json(report))["transfer"]
        assert [transfer[name] for name in ("bytes_per_second", "tokens_per_second", "of_memcpy")] == [None] * 3


def shown(report: Report) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        show(report, console)
    return capture.get()
