"""The command line: output, exit codes and response time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvtier import __version__
from kvtier.protos.v1 import admin_pb2, admin_pb2_grpc
from kvtier.server import cli
from kvtier.server.commands import console

HEAVY = ("grpc", "structlog", "rich", "msgspec", "prometheus_client", "lmdb", "numpy", "torch", "asyncio", "shtab")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def status_of_a_busy_server() -> admin_pb2.GetStatusResponse:
    """Returns a status with a value in every field."""
    return admin_pb2.GetStatusResponse(
        server_version="9.8.7",
        epoch=0xABC,
        uptime=Duration(seconds=7500, nanos=500_000_000),
        leases=4,
        stores=1,
        quarantined_bytes=3 << 20,
        namespaces=2,
        tiers=[
            admin_pb2.TierStatus(
                name="cpu",
                type="cpu",
                capacity_bytes=8 << 30,
                available_bytes=4 << 30,
                used_bytes=2 << 30,
                blocks=1024,
                hits=3,
                misses=1,
                healthy=True,
            ),
            admin_pb2.TierStatus(name="lmdb", type="lmdb", capacity_bytes=1 << 30, trouble="the disk is full"),
        ],
        sessions=[
            admin_pb2.SessionStatus(
                client_name="vllm", engine_id="e1", rank=0, pid=77, transport="shm", model="m/[x]", attached=True
            ),
            admin_pb2.SessionStatus(client_name="vllm", engine_id="e1", pid=78, transport="shm", model="m/[x]"),
        ],
    )


Answer = Callable[[grpc.ServicerContext], admin_pb2.GetStatusResponse]


@pytest.fixture
def serve_status(tmp_path: Path) -> Iterator[Callable[[Answer], str]]:
    """Returns a function that serves AdminService with a given answer and returns its endpoint."""
    servers = []

    def serve(answer: Answer) -> str:
        class Admin(admin_pb2_grpc.AdminServiceServicer):
            def GetStatus(self, _: Any, context: grpc.ServicerContext) -> admin_pb2.GetStatusResponse:  # noqa: N802
                return answer(context)

        server = grpc.server(ThreadPoolExecutor(2))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(), server)
        endpoint = f"unix:{tmp_path}/fake.sock"
        server.add_insecure_port(endpoint)
        server.start()
        servers.append(server)
        return endpoint

    yield serve
    for server in servers:
        server.stop(0).wait()


class TestStart:
    def test_help_imports_nothing_heavy(self) -> None:
        """`kvtier --help` therefore answers in less than 150 ms on an idle machine."""
        code = (
            "import sys; from kvtier.server import cli\n"
            "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
            f"sys.exit(str([name for name in {HEAVY!r} if name in sys.modules]))"
        )
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        print(f"kvtier --help: {time.perf_counter() - started:.3f} s")
        assert done.stderr.strip() == "[]"
        assert "exit codes:" in done.stdout

    def test_version_is_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The output is the version of the package."""
        with pytest.raises(SystemExit) as ended:
            cli.main(["--version"])
        assert ended.value.code == 0
        assert capsys.readouterr().out == f"kvtier {__version__}\n"

    def test_the_package_can_be_run_as_a_module(self) -> None:
        command = [sys.executable, "-m", "kvtier.server", "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == f"kvtier {__version__}\n"

    @pytest.mark.parametrize(
        "arguments", [[], ["sevre"], ["serve", "--regoin-size", "1"], ["status", "--timeout", "x"]]
    )
    def test_wrong_usage_exits_with_2(self, arguments: list[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == console.EXIT_USAGE


MISTAKES = {
    "statsu": "unknown choice 'statsu'; did you mean status?",
    "leses": "did you mean leases?",
    "xyz": "unknown choice 'xyz'; choose from serve, config",
    "status --endpont x": "unknown argument --endpont; did you mean --endpoint?",
    "evict --older-then=5m": "unknown argument --older-then=5m; did you mean --older-than?",
    "serve --regoin-size 1": "did you mean --region-size?",
    "token nw": "did you mean new?",
    "size --dtype fp9 c.json": "did you mean fp8?",
    "status extra": "unknown argument extra",
    "completion bsh": "did you mean bash?",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistyped_word_gets_a_suggestion(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands, options and choices; the error has the usage of the command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == console.EXIT_USAGE
    said = capsys.readouterr().err
    assert MISTAKES[line] in said
    if " --" in line:
        assert said.startswith(f"usage: kvtier {line.split(maxsplit=1)[0]} ")


NUMBERS = {
    "--timeout": [f"{command} --timeout" for command in ("status", "top", "leases", "evict --all", "drain", "doctor")],
    "--interval": ["top --interval"],
    "--count": ["top --count"],
    "--most": ["leases --most", "handoffs --most"],
    "--block-tokens": ["size config.json --block-tokens"],
    "--tp": ["size config.json --tp"],
}
NO_LIMIT = ("--count", "--most")
"""Options for which 0 means no limit."""


@pytest.mark.parametrize(("option", "line"), [(option, line) for option, lines in NUMBERS.items() for line in lines])
def test_a_number_out_of_range_is_refused(option: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Negative numbers, NaN, infinity, text, and 0 if it has no meaning."""
    for value in ("-1", "-0.5", "nan", "inf", "-inf", "1e400", "many", "", *([] if option in NO_LIMIT else ["0"])):
        with pytest.raises(SystemExit) as ended:
            cli.main([*line.split()[:-1], f"{option}={value}"])
        assert ended.value.code == console.EXIT_USAGE
        assert f"argument {option}: must be " in capsys.readouterr().err


SIZES = (
    *("evict --bytes 0", "evict --bytes=-1", "evict --bytes nan"),
    *("evict --older-than 0", "evict --older-than=-1", "evict --older-than inf"),
    *("size config.json --cpu 0", "size config.json --disk nan", "fsck --online --rate=-1"),
)


@pytest.mark.parametrize("line", SIZES)
def test_a_size_or_duration_out_of_range_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command does not ask the server."""
    assert cli.main(line.split()) == console.EXIT_USAGE
    assert re.search("must be more than 0|not a size|not a duration", capsys.readouterr().err)


class TestConfig:
    def test_prints_toml(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The effective configuration is TOML, with the origin of each value."""
        assert cli.main(["config", "--region-size", "32MiB", "--log-level", "error", "--cpu-only"]) == 0
        out = capsys.readouterr().out
        values = tomllib.loads(out)
        assert values["region_size"] == "32MiB"
        assert values["log"]["level"] == "error"
        assert values["tiers"] == []
        assert out.count("# --") == 3

    def test_prints_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The output with --json is one document; warnings go to standard error."""
        assert cli.main(["config", "--json", "--insecure", "--listen", "127.0.0.1:7", "--listen", "unix:/a.sock"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["config"]["listen"] == ["127.0.0.1:7", "unix:/a.sock"]
        assert captured.err.startswith("kvtier: warning: listening on 127.0.0.1:7")

    def test_prints_reference(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The option --reference explains every setting, and needs no valid configuration."""
        assert cli.main(["config", "--reference", "--region-size", "lots"]) == 0
        assert "| `limits.max_keys` | `KVTIER_LIMITS_MAX_KEYS` |" in capsys.readouterr().out

    @pytest.mark.parametrize("command", ["config", "serve"])
    def test_an_invalid_configuration_exits_with_78(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        """The output is one line per error, without a traceback."""
        assert cli.main([command, "--region-size", "lots", "--metrics", "x"]) == console.EXIT_CONFIG
        lines = capsys.readouterr().err.splitlines()
        assert [line.split(" = ")[0] for line in lines] == [
            "kvtier: error: --region-size: region_size",
            "kvtier: error: --metrics: metrics",
        ]

    def test_a_closed_pipe_causes_no_traceback(self) -> None:
        command = f"{sys.executable} -u -m kvtier.server config | head -c 1"
        done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True, timeout=60)
        assert (done.stdout, done.stderr) == ("#", "")

    def test_a_full_disk_is_named(self) -> None:
        """`kvtier config > file` reports that the disk is full."""
        command = f"{sys.executable} -m kvtier.server config > /dev/full"
        done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == console.EXIT_FAILURE
        assert done.stderr == "kvtier: error: the output cannot be written: No space left on device\n"


class TestStatus:
    def test_table(self, serve_status: Any, capsys: pytest.CaptureFixture[str]) -> None:
        """The text has tiers with fill and hit ratio, sessions, transports, uptime and epoch."""
        endpoint = serve_status(lambda _: status_of_a_busy_server())
        assert cli.main(["status", "--endpoint", endpoint]) == 0
        out = capsys.readouterr().out
        assert f"kvtier 9.8.7 at {endpoint}, up 2 h 5 min, epoch 0000000000000abc" in out
        for piece in ("2.0 GiB", "8.0 GiB (4.0 GiB ready)", "25.0%", "75.0%", "1,024", "trouble"):
            assert piece in out
        assert "lmdb: the disk is full" in out
        for piece in ("vllm", "scheduler", "shm", "m/[x]", "mapped", "4 leases, 1 stores in flight", "3.0 MiB in quar"):
            assert piece in out

    def test_json(self, serve_status: Any, capsys: pytest.CaptureFixture[str]) -> None:
        """A tier without lookups has no hit ratio, and a scheduler has no rank."""
        endpoint = serve_status(lambda _: status_of_a_busy_server())
        assert cli.main(["status", "--endpoint", endpoint, "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert status["uptime_seconds"] == 7500.5
        assert status["epoch"] == "0000000000000abc"
        assert [(tier["fill"], tier["hit_rate"]) for tier in status["tiers"]] == [(0.25, 0.75), (0, None)]
        assert [session["rank"] for session in status["sessions"]] == [0, None]
        fields = {field.name for field in admin_pb2.GetStatusResponse.DESCRIPTOR.fields}
        durations = {"uptime", "loop_lag"}
        assert set(status) >= fields - durations | {f"{name}_seconds" for name in durations}

    def test_an_unreachable_server_exits_with_2(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """One line names the default endpoint."""
        assert cli.main(["status"]) == console.EXIT_UNREACHABLE
        assert capsys.readouterr().err == (
            f"kvtier: error: no server answers at unix:{tmp_path}/kvtier/kvtier.sock; is `kvtier serve` running there?\n"
        )

    def test_a_silent_server_times_out(self, serve_status: Any, capsys: pytest.CaptureFixture[str]) -> None:
        """A server that does not answer in time counts as unreachable."""
        gate = threading.Event()
        endpoint = serve_status(lambda _: gate.wait(60) and status_of_a_busy_server())
        assert cli.main(["status", "--endpoint", endpoint, "--timeout", "0.2"]) == console.EXIT_UNREACHABLE
        assert capsys.readouterr().err == f"kvtier: error: no answer from {endpoint} within 0.2 s\n"
        gate.set()

    @pytest.mark.parametrize(
        ("code", "line"),
        [
            (
                grpc.StatusCode.UNIMPLEMENTED,
                "the gRPC server at {} is not kvtier, or its version is too old for this call",
            ),
            (grpc.StatusCode.INTERNAL, "{}: INTERNAL: it broke"),
        ],
    )
    def test_an_error_status_exits_with_1(
        self, serve_status: Any, capsys: pytest.CaptureFixture[str], code: grpc.StatusCode, line: str
    ) -> None:
        endpoint = serve_status(lambda context: context.abort(code, "it broke\nbadly"))
        assert cli.main(["status", "--endpoint", endpoint]) == console.EXIT_FAILURE
        assert capsys.readouterr().err == f"kvtier: error: {line.format(endpoint)}\n"

    def test_an_invalid_endpoint_is_wrong_usage(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["status", "--endpoint", "nonsense"]) == console.EXIT_USAGE
        assert capsys.readouterr().err == "kvtier: error: 'nonsense' is neither unix:PATH nor HOST:PORT\n"
