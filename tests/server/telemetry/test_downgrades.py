"""Downgrades: each is a warning once, and is shown by the status, by doctor and by a metric."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from harness.bulk import wait_for_bulk
from harness.command_line import json_output, kvtier
from harness.payloads import namespace_of
from harness.polling import wait_until
from harness.ports import ReservedPort
from harness.raw import RawSession
from harness.server_process import ServerProcess, bulk_pid
from harness.traffic import PART
from structlog.testing import capture_logs

from kvtier.client import Client
from kvtier.server.telemetry.downgrades import Downgrade, Downgrades


def causes(server: ServerProcess, feature: str) -> list[str]:
    return [each.cause for each in server.status().downgrades if each.feature == feature]


def test_a_downgrade_is_logged_once_per_cause() -> None:
    """Repeated reports are silent until the cause changes, or the downgrade has ended."""
    downgrades = Downgrades()
    with capture_logs() as lines:
        for cause in ("a", "a", "b"):
            downgrades.report("streams", cause, "do")
        assert downgrades.all() == [Downgrade("streams", "b", "do")]
        downgrades.report("streams", "c", "do", subject="another")
        downgrades.end("streams")
        downgrades.end("streams")
        downgrades.report("streams", "b", "do")
    assert [each.cause for each in downgrades.all()] == ["c", "b"]
    assert [(line["event"], line["feature"], line["remedy"], line["log_level"]) for line in lines] == [
        (cause, "streams", "do", "warning") for cause in "abcb"
    ]


def test_what_a_setting_permits_is_shown(tmp_path: Path) -> None:
    """A warning about the configuration stays visible: encryption off, streams off."""
    with ReservedPort() as metrics:
        config = f'metrics = "127.0.0.1:{metrics.number}"\n[bulk]\ntcp = false'
        with ServerProcess(tmp_path, tcp=True, config=config) as server:
            server.start()
            found = causes(server, "configuration")
            assert any("unencrypted" in cause for cause in found)
            assert any("bulk.tcp = false" in cause for cause in found)
            assert all(server.log.count(cause) == 1 for cause in found)
            shown = kvtier("status", "--endpoint", server.endpoint).stdout
            values = json_output("status", "--endpoint", server.endpoint)
            findings = json_output("doctor", "--no-disk-test", "--only", "server", "--endpoint", server.endpoint)
            for cause in found:
                assert cause in shown
                assert cause in [each["cause"] for each in values["downgrades"]]
                assert any(cause in each["seen"] and each["verdict"] == "warn" for each in findings["findings"])
            with socket.create_connection(("127.0.0.1", metrics.number)) as connection:
                connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
            assert f'kvtier_downgrades{{feature="configuration"}} {len(found)}.0' in text
            assert 'kvtier_downgrades{feature="streams"} 0.0' in text


def test_a_bulk_process_that_does_not_run(tmp_path: Path) -> None:
    """It is shown until the next one serves."""
    with ServerProcess(tmp_path) as server:
        server.start()
        with Client(server.endpoint, namespace=namespace_of(PART), transport="tcp") as client:
            wait_for_bulk(client)
            assert causes(server, "streams") == []
            while not causes(server, "streams"):  # the delay of the restart grows
                os.kill(pid, signal.SIGKILL) if (pid := bulk_pid(server.pid)) else None
            wait_until(lambda: not causes(server, "streams"), 60)


def test_events_without_a_process(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, config=f'[events]\npublish = "ipc://{tmp_path}/e"') as server:
        server.start()

        def reader() -> int | None:
            for status in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    if (
                        b"events.readers" in status.read_bytes()
                        and str(server.pid) in (status.with_name("stat")).read_text()
                    ):
                        return int(status.parent.name)
                except OSError:
                    continue
            return None

        while not causes(server, "events"):
            os.kill(pid, signal.SIGKILL) if (pid := reader()) else None
        wait_until(lambda: not causes(server, "events"), 60)


def test_a_session_that_does_not_map_the_region(tmp_path: Path) -> None:
    """The status names its process; the log of the client has the cause."""
    with ServerProcess(tmp_path) as server:
        server.start()
        with RawSession(server.endpoint, namespace_of(PART), engine_id="e", transport="shm"):
            wait_until(lambda: causes(server, "shared_memory"), 60, interval=0.5)
            [cause] = causes(server, "shared_memory")
            assert cause.startswith("1 sessions have not mapped the shared memory")
            assert "raw (pid 0)" in cause
        wait_until(lambda: not causes(server, "shared_memory"), 60)
