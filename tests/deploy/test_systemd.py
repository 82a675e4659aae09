"""The unit of `deploy/systemd`, as it stands in the repository, under a real systemd."""

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

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="wants Debian's package systemd")


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    """A systemd that knows the unit, on a machine that was set up as the documentation says."""
    if reason := unavailable_reason():
        pytest.skip(f"no systemd can be run here: {reason}")
    units = tmp_path / "units"
    (units / f"{UNIT}.d").mkdir(parents=True)
    shutil.copy(FILES / UNIT, units)
    # All else is as in the repository: less to wait for, and a log where the test finds it.
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


def test_the_unit_has_no_error_and_little_exposure(tmp_path: Path) -> None:
    """Every line of it is known to systemd, and what a server that was taken over could do is bounded."""
    unit = tmp_path / UNIT
    unit.write_text((FILES / UNIT).read_text().replace("/opt/kvtier/bin/kvtier", "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", str(unit)]
    exposure = subprocess.run(command, capture_output=True, text=True, check=False)
    assert exposure.returncode == 0, exposure.stdout[-2000:]


def test_a_start_is_over_when_the_server_serves(systemd: Systemd, tmp_path: Path) -> None:
    """`systemctl start` returns to a server that answers, under its user; its end is in order and leaves no socket."""
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


def test_nothing_that_it_needs_is_forbidden(systemd: Systemd, tmp_path: Path) -> None:
    """Within the unit's fences the region has its memory, blocks their disk, and streams their process."""
    systemd.run("systemctl", "start", UNIT)
    done = systemd.run(
        *("runuser", "-u", "kvtier", "--", "/opt/kvtier/bin/python", "/opt/source/tests/harness/round_trip.py")
    )
    assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()
    assert json.loads(done.stdout) == {"shm": "sound", "grpc": "sound", "durable": True}
    assert "region backed" in _events(tmp_path)


def test_a_server_that_hangs_is_ended_and_another_is_started(systemd: Systemd) -> None:
    """SIGSTOP stops the event loop: the watchdog is heard from no more."""
    systemd.run("systemctl", "start", UNIT)
    before = systemd.show(UNIT, "MainPID")
    systemd.run("kill", "-STOP", before)
    systemd.wait_for(UNIT, "NRestarts", "1")
    systemd.wait_for(UNIT, "ActiveState", "active")
    assert systemd.show(UNIT, "MainPID") != before


def test_a_killed_server_is_there_again(systemd: Systemd) -> None:
    """After SIGKILL another one serves on the same socket."""
    systemd.run("systemctl", "start", UNIT)
    systemd.run("kill", "-KILL", systemd.show(UNIT, "MainPID"))
    systemd.wait_for(UNIT, "NRestarts", "1")
    systemd.wait_for(UNIT, "ActiveState", "active")
    answer = systemd.run("/opt/kvtier/bin/kvtier", "status", "--endpoint", "unix:/run/kvtier/kvtier.sock")
    assert answer.returncode == 0


def test_a_configuration_that_cannot_be_used_is_not_tried_again(systemd: Systemd) -> None:
    """Exit code 78: the unit fails once, and stays down."""
    systemd.run("sh", "-c", "echo 'regoin_size = 1' >> /etc/kvtier/kvtier.toml")
    assert systemd.run("systemctl", "start", UNIT).returncode != 0
    assert systemd.show(UNIT, "ExecMainStatus") == "78"
    assert [systemd.show(UNIT, name) for name in ("ActiveState", "NRestarts")] == ["failed", "0"]
