"""Runs Debian's Prometheus, unpacked, with one scrape per second (`make test-web`)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.polling import polls

__all__ = ["Prometheus", "program", "running"]

READY_SECONDS = 30.0


class Prometheus:
    """API client of a running Prometheus."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        """Returns the API's answer. Raises `urllib.error.HTTPError` with its text on a refusal."""
        url = f"{self._base}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - ours, on loopback
                text = answer.read()
        except urllib.error.HTTPError as error:
            error.msg = error.read().decode(errors="replace")
            raise
        return json.loads(text)["data"] if path.startswith("/api/") else text

    def ask(self, expression: str) -> list[float]:
        answer = self.get("/api/v1/query", query=expression)
        if answer["resultType"] == "scalar":
            return [float(answer["result"][1])]
        return [float(sample["value"][1]) for sample in answer["result"]]


def program(name: str) -> Path:
    """Returns the path of `prometheus` or `promtool`. Skips the test without PROMETHEUS_DIR."""
    directory = os.environ.get("PROMETHEUS_DIR")
    if not directory:
        pytest.skip("PROMETHEUS_DIR is not set: make test-web")
    found = Path(directory) / "usr" / "bin" / name
    assert found.exists(), f"there is no {found}"
    return found


@contextlib.contextmanager
def running(directory: Path, jobs: Mapping[str, Mapping[str, int]], rules: Sequence[Path]) -> Iterator[Prometheus]:
    """Runs Prometheus with the targets of jobs (name to port) and rules, evaluated every second."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [
                    {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}} for name, port in targets.items()
                ],
            }
            for job, targets in jobs.items()
        ],
    }
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        str(program("prometheus")),
        f"--config.file={path}",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = directory / "prometheus.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            prometheus = Prometheus(port)
            _wait_ready(prometheus, process, log)
            yield prometheus
        finally:
            process.terminate()
            process.wait(30)


def _wait_ready(prometheus: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in polls(READY_SECONDS, 0.1):
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError):
            prometheus.get("/-/ready")
            return
    raise AssertionError(log.read_text())
