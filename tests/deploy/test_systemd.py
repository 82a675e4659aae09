"""The unit in `deploy/systemd`, run unchanged under a real systemd."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.systemd import Systemd, unavailable_reason

FILES = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
UNIT = "kvtier.service"

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs Debian's package systemd")


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    """A systemd with the unit, installed as docs/deploy.md describes."""
    if reason := unavailable_reason():
        pytest.skip(f"systemd cannot run here: {reason}")
    units = tmp_path / "units"
    (units / f"{UNIT}.d").mkdir(parents=True)
    shutil.copy(FILES / UNIT, units)
    # Differences from the repository: shorter waits, and a log file for the test.
    (units / f"{UNIT}.d" / "test.conf").write_text(
        "[Unit]\nDefaultDependencies=no\n[Service]\nWatchdogSec=3\nEnvironment=KVTIER_REGION_SIZE=32MiB KVTIER_METRICS=off\n"
        f"StandardOutput=append:{tmp_path}/log\nStandardError=inherit\n"
    )
    with Systemd(units, tmp_path / "systemd.log") as manager:
        assert manager.run("systemd-sysusers", f"{FILES}/kvtier.sysusers.conf").returncode == 0
        assert manager.run("install", "-D", f"{FILES}/kvtier.toml", "/etc/kvtier/kvtier.toml").returncode == 0
        yield manager


def _events(tmp_path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]


def test_unit_is_valid_and_hardened(tmp_path: Path) -> None:
    """Every line is accepted by systemd, and the exposure score is at most 2.0."""
    unit = tmp_path / UNIT
    unit.write_text((FILES / UNIT).read_text().replace("/opt/kvtier/bin/kvtier", "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", str(unit)]
    exposure = subprocess.run(command, capture_output=True, text=True, check=False)
    assert exposure.returncode == 0, exposure.stdout[-2000:]


def test_start_returns_when_the_server_serves(systemd: Systemd, tmp_path: Path) -> None:
    """The server runs as its user, stops in order and leaves no socket."""
    started = systemd.run("systemctl", "start", UNIT)
    assert started.returncode == 0, systemd.log + (tmp_path / "log").read_text()
    status = systemd.run("/opt/kvtier/bin/kvtier", "status", "--json", "--endpoint", "unix:/run/kvtier/kvtier.sock")
    assert {tier["name"] for tier in json.loads(status.stdout)["tiers"]} == {"cpu", "lmdb"}, status.stderr
    owner = systemd.run("stat", "--format", "%U %a", "/run/kvtier/kvtier.sock", "/var/lib/kvtier")
    assert owner.stdout.split("\n")[:2] == ["kvtier 600", "kvtier 700"]
    assert systemd.run("systemctl", "stop", UNIT).returncode == 0
    assert [systemd.show(UNIT, name) for name in ("Result", "ExecMainStatus", "NRestarts")] == ["success", "0", "0"]
    assert _events(tmp_path)[-1] == "stopped"
    assert systemd.run("ls", "/run/kvtier").returncode != 0


def test_sandbox_permits_all_features(systemd: Systemd, tmp_path: Path) -> None:
    """In the sandbox, shared memory, durable stores and gRPC streams work."""
    systemd.run("systemctl", "start", UNIT)
    done = systemd.run(
        *("runuser", "-u", "kvtier", "--", "/opt/kvtier/bin/python", "/opt/source/tests/harness/round_trip.py")
    )
    assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()
    assert json.loads(done.stdout) == {"shm": "sound", "grpc": "sound", "durable": True}
    assert "region backed" in _events(tmp_path)


@pytest.mark.slow
def test_watchdog_restarts_a_server_that_hangs(systemd: Systemd) -> None:
    """SIGSTOP stops the event loop, so the watchdog gets no more reports."""
    systemd.run("systemctl", "start", UNIT)
    before = systemd.show(UNIT, "MainPID")
    systemd.run("kill", "-STOP", before)
    systemd.wait_for(UNIT, "NRestarts", "1")
    systemd.wait_for(UNIT, "ActiveState", "active")
    assert systemd.show(UNIT, "MainPID") != before


def test_killed_server_is_restarted(systemd: Systemd) -> None:
    """After SIGKILL another server serves on the same socket."""
    systemd.run("systemctl", "start", UNIT)
    systemd.run("kill", "-KILL", systemd.show(UNIT, "MainPID"))
    systemd.wait_for(UNIT, "NRestarts", "1")
    systemd.wait_for(UNIT, "ActiveState", "active")
    answer = systemd.run("/opt/kvtier/bin/kvtier", "status", "--endpoint", "unix:/run/kvtier/kvtier.sock")
    assert answer.returncode == 0


@pytest.mark.parametrize("how", ["kill", "restart"])
def test_memory_outlives_the_server(systemd: Systemd, tmp_path: Path, how: str) -> None:
    """The blocks of the CPU tier survive SIGKILL and `systemctl restart`, not `systemctl stop`."""
    systemd.run("systemctl", "start", UNIT)
    for number in range(2):
        stored = systemd.run(
            *("runuser", "-u", "kvtier", "--", "/opt/kvtier/bin/python", "/opt/source/tests/harness/round_trip.py")
        )
        assert stored.returncode == 0, stored.stderr
        if how == "kill":
            systemd.run("kill", "-KILL", systemd.show(UNIT, "MainPID"))
            systemd.wait_for(UNIT, "NRestarts", f"{number + 1}")
        else:
            systemd.run("systemctl", "restart", UNIT)
        systemd.wait_for(UNIT, "ActiveState", "active")
        assert _blocks_after_warm_starts(tmp_path)[number:] == [_blocks_after_warm_starts(tmp_path)[-1]]
        assert _blocks_after_warm_starts(tmp_path)[-1] > 0
    systemd.run("systemctl", "stop", UNIT)
    systemd.run("systemctl", "start", UNIT)
    assert len(_blocks_after_warm_starts(tmp_path)) == 2


def _blocks_after_warm_starts(tmp_path: Path) -> list[int]:
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    return [line["blocks"] for line in lines if line["event"].startswith("warm start")]


def test_invalid_configuration_is_not_retried(systemd: Systemd) -> None:
    """With exit code 78 the unit fails once and is not restarted."""
    systemd.run("sh", "-c", "echo 'regoin_size = 1' >> /etc/kvtier/kvtier.toml")
    assert systemd.run("systemctl", "start", UNIT).returncode != 0
    assert systemd.show(UNIT, "ExecMainStatus") == "78"
    assert [systemd.show(UNIT, name) for name in ("ActiveState", "NRestarts")] == ["failed", "0"]
