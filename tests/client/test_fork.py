"""A client on both sides of a fork: the child gets one clear error, the parent is not disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.auth_site import make_site
from harness.bulk import serving

FORKS = 6
_TESTS = Path(__file__).parents[1]
_ROUTES = pytest.mark.parametrize(
    ("route", "transport"), [("unix", "shm"), ("unix", "tcp"), ("unix", "grpc"), ("tcp", "tcp"), ("tcp", "grpc")]
)


@pytest.fixture(autouse=True)
def insecure(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "route" in request.fixturenames:  # not with TLS
        monkeypatch.setenv("KVTIER_INSECURE", "true")


def _output(script: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """Runs a script beside this file; returns the JSON that it prints, and its errors."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_TESTS), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(Path(__file__).with_name(script)), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr[-3000:]


def _both_sides(*arguments: str) -> None:
    found, errors = _output("fork_both_sides.py", *arguments)
    in_loop = found.pop("in loop")
    assert found == {"children": [0] * FORKS, "failures": []}, errors
    assert set(in_loop["hits"]) == {4}
    assert set(filter(None, in_loop["children"])) == {"ForkedClient"}


def _objects(*arguments: str) -> None:
    found, errors = _output("fork_objects.py", *arguments)
    assert found, errors
    assert not any(found.values()), (found, errors)


@_ROUTES
def test_both_sides_of_a_fork(tmp_path: Path, route: str, transport: str) -> None:
    with serving(route, tmp_path) as served:
        _both_sides(served.endpoint, transport, str(FORKS))


@_ROUTES
def test_objects_in_a_forked_child(tmp_path: Path, route: str, transport: str) -> None:
    """Leases, `with` blocks, locks, event loops, pools, own clients and all ways to exit."""
    with serving(route, tmp_path) as served:
        _objects(served.endpoint, transport)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_forks_with_tls(tmp_path: Path, transport: str) -> None:
    site = make_site(tmp_path)
    with site.server.start():
        access = str(site.authority.ca), site.tokens.token["acme-far"]
        _both_sides(site.server.tcp, transport, str(FORKS), *access)
        _objects(site.server.tcp, transport, *access)
