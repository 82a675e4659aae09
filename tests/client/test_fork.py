"""A client on both sides of a fork: the child gets one clear error, the parent is not disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.auth_site import make_site
from harness.bulk import serving

FORKS = 6
_SCRIPT = Path(__file__).with_name("fork_both_sides.py")
_TESTS = Path(__file__).parents[1]


def _run(*arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_TESTS), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(_SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    in_loop = found.pop("in loop")
    assert found == {"children": [0] * FORKS, "failures": []}, done.stderr[-3000:]
    assert set(in_loop["hits"]) == {4}
    assert set(filter(None, in_loop["children"])) == {"ForkedClient"}


@pytest.mark.parametrize(("route", "transport"), [("unix", "shm"), ("unix", "tcp"), ("tcp", "tcp"), ("tcp", "grpc")])
def test_both_sides_of_a_fork(tmp_path: Path, route: str, transport: str) -> None:
    with serving(route, tmp_path) as served:
        os.environ["KVTIER_INSECURE"] = "true"
        try:
            _run(served.endpoint, transport, str(FORKS))
        finally:
            del os.environ["KVTIER_INSECURE"]


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_both_sides_of_a_fork_with_tls(tmp_path: Path, transport: str) -> None:
    site = make_site(tmp_path)
    with site.server.start():
        _run(site.server.tcp, transport, str(FORKS), str(site.authority.ca), site.tokens.token["acme-far"])
