"""Every command in docs/security.md runs unchanged, in order, in an empty directory."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.ports import ReservedPort

from kvtier.server.auth.tokens import read_token_file, token_hash
from kvtier.server.config.loader import load

DOCUMENT = Path(__file__).parents[3] / "docs" / "security.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"^```console\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
TABLES = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def port() -> Iterator[int]:
    with ReservedPort() as reserved:
        yield reserved.number


@pytest.mark.timeout(180)
def test_its_commands_run(tmp_path: Path, port: int) -> None:
    """Covers a refused start, an authority, a certificate, tokens, and a server that uses them."""
    programs = tmp_path / "bin"
    programs.mkdir()
    kvtier = programs / "kvtier"
    kvtier.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvtier.server "$@"\n')
    kvtier.chmod(0o755)
    (tmp_path / "secure.toml").write_text(f'region_size = "16MiB"\ntiers = []\n{TABLES[1]}')
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    environment["XDG_RUNTIME_DIR"] = environment["XDG_DATA_HOME"] = str(tmp_path)
    servers = []
    try:
        for command in COMMANDS:
            line = command.replace(":7070", f":{port}")
            if line.endswith("&"):
                words = line.removesuffix("&").split()
                with (tmp_path / "log").open("w") as log:
                    servers.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=log))
                continue
            deadline = time.monotonic() + 60
            while True:
                done = subprocess.run(
                    ["sh", "-c", line],
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=60,
                )
                wanted = 78 if "exit code 78" in line else 0
                if done.returncode == wanted:
                    break
                # a server that was just started may not be ready yet
                assert servers, f"{line}: {done.stderr}"
                assert time.monotonic() < deadline, f"{line}: {done.returncode}\n{done.stdout}{done.stderr}"
    finally:
        for server in servers:
            server.terminate()
            server.wait(45)
    assert len(servers) == 1
    known = read_token_file(tmp_path / "tokens.toml")
    assert len(known.tokens) == 3
    token = (tmp_path / "acme.token").read_text().strip()
    assert token_hash(token) in (tmp_path / "tokens.toml").read_text()
    assert not stat.S_IMODE((tmp_path / "tokens.toml").stat().st_mode) & 0o077


def test_its_configuration_files_are_valid(tmp_path: Path) -> None:
    tokens, _, bounds = TABLES
    (tmp_path / "tokens.toml").write_text(
        tokens.replace("sha256:…", token_hash("x")).replace("# shared", "shared").replace("# exp", "exp")
    )
    known = read_token_file(tmp_path / "tokens.toml")
    assert (len(known.tokens), len(known.certificates)) == (1, 1)
    (tmp_path / "c.toml").write_text(f'region_size = "64MiB"\n{bounds}')
    [tenant] = load(file=tmp_path / "c.toml", environ={}).config.tenants
    assert (tenant.rates.calls, tenant.rates.bytes, tenant.rates.sessions) == (500, 500 << 20, 16)
