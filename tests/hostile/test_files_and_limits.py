"""Attacks by other users of the host through files, and starts with too small resource limits."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.auth_site import PART, TIMEOUTS, Site, error_of, make_site, refusal_error
from harness.bulk import fresh, store_all
from harness.certificates import Authority
from harness.fork_server import run_command
from harness.payloads import namespace_of
from harness.polling import wait_until
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, Credentials, KVTierError
from kvtier.server.auth.tokens import format_entry, new_token, token_hash

EXIT_CONFIG = 78
FOREIGN = 4711
END_SECONDS = 60
INSECURE = Credentials(insecure=True)

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    made = ServerProcess(tmp_path, region=16 * MIB, lmdb=32 * MIB, tcp=True)
    with made:
        yield made


def refused_line(server: ServerProcess, code: int, *, prefix: tuple[str, ...] = ()) -> str:
    """Starts a server that must end by itself; returns its first line of output."""
    if prefix:
        command = [*prefix, sys.executable, "-m", "kvtier.server", *server._arguments]
        done = subprocess.run(
            command, env=server._environment, capture_output=True, text=True, timeout=END_SECONDS, check=False
        )
    else:
        done = run_command(server._arguments, environment=server._environment, timeout=END_SECONDS)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    lines = output.splitlines()  # with little address space also a line about threads
    assert all(line.startswith("kvtier: error: ") for line in lines)
    return lines[0]


class TestFilesAtTheStart:
    @pytest.mark.parametrize("name", ["kvtier.toml", "tokens.toml", "server.pem", "server.key", "readers.toml"])
    @pytest.mark.parametrize("attack", ["mode", "owner", "directory", "link"])
    def test_a_file_that_another_user_can_change(self, tmp_path: Path, name: str, attack: str) -> None:
        if attack in ("owner", "link") and os.geteuid():
            pytest.skip("only root can act as another user")
        file = tmp_path / name
        events = ""
        if name == "readers.toml":
            file.touch(0o600)
            events = f'[events]\npublish = "tcp://127.0.0.1:1"\nkeys = "{file}"\n'
        made = make_site(tmp_path, config=events)
        if attack == "mode":
            file.chmod(0o666)
        elif attack == "owner":
            os.chown(file, FOREIGN, 0)
        else:
            planted = tmp_path / "planted"
            planted.mkdir()
            target = planted / name
            file.rename(target)
            file.symlink_to(target)
            if attack == "directory":
                planted.chmod(0o777)
            else:
                os.chown(file, FOREIGN, 0, follow_symlinks=False)
        with made.server:
            line = refused_line(made.server, EXIT_CONFIG)
        assert "can change it: ch" in line
        assert name in line

    @pytest.mark.parametrize("name", ["", "lmdb", "lmdb/data.mdb", "lmdb/lock.mdb"])
    def test_a_store_that_every_user_can_write(self, server: ServerProcess, name: str) -> None:
        server.start()
        assert server.terminate() == 0
        path = server.data_dir / name
        path.chmod(path.stat().st_mode | 0o022)
        assert f"{path} has mode" in refused_line(server, EXIT_CONFIG)
        path.chmod(path.stat().st_mode & ~0o022)
        server.start()

    @root_only
    @pytest.mark.parametrize("name", ["", "lmdb", "lmdb/data.mdb"])
    def test_a_store_of_another_user(self, server: ServerProcess, name: str) -> None:
        (server.data_dir / "lmdb").mkdir(parents=True)
        if name.endswith(".mdb"):
            (server.data_dir / name).touch()
        os.chown(server.data_dir / name, FOREIGN, FOREIGN)
        assert f"belongs to user {FOREIGN}" in refused_line(server, EXIT_CONFIG)

    def test_a_link_in_a_store_to_a_file_of_others(self, server: ServerProcess) -> None:
        target = server.directory / "target"
        target.touch()
        target.chmod(0o666)
        (server.data_dir / "lmdb").mkdir(parents=True)
        (server.data_dir / "lmdb" / "data.mdb").symlink_to(target)
        assert f"{target} has mode 0666" in refused_line(server, EXIT_CONFIG)

    def test_new_directories_are_private_under_any_umask(self, server: ServerProcess) -> None:
        before = os.umask(0)
        try:
            server._prefix = ("env",)
            server.start()
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o077 for path in (server.data_dir, *server.data_dir.rglob("*"))} == {0}

    def test_a_secret_that_every_user_can_read_is_a_warning(self, tmp_path: Path) -> None:
        """Kubernetes mounts secrets with mode 0644 by default."""
        made = make_site(tmp_path)
        (tmp_path / "server.key").chmod(0o644)
        with made.server.start():
            assert "server.key has mode 0644, so every user can read the secret" in made.server.log


class TestFilesOfARunningServer:
    @pytest.fixture
    def site(self, tmp_path: Path) -> Iterator[Site]:
        made = make_site(tmp_path)
        with made.server.start():
            yield made
            assert made.server.alive

    @pytest.mark.parametrize("attack", ["mode", "directory", "owner"])
    def test_a_planted_token_is_never_valid(self, site: Site, attack: str) -> None:
        """The previous tokens stay, also those that the planted file lacks."""
        if attack == "owner" and os.geteuid():
            pytest.skip("only root can act as another user")
        tokens = site.tokens.path
        original = tokens.read_text()
        planted = new_token()
        entry = format_entry("planted", token_hash(planted), "*", ["engine", "admin"], shared_memory=True)
        file = tokens.with_name("new")
        file.write_text(entry)
        file.chmod(0o666 if attack == "mode" else 0o600)
        if attack == "owner":
            os.chown(file, FOREIGN, 0)
        if attack == "directory":
            tokens.parent.chmod(0o777)
        file.replace(tokens)
        wait_until(lambda: "the previous tokens stay valid" in site.server.log)
        site.tokens.token["planted"] = planted
        with site.client("planted", tenant="zeta", unix=True) as client:
            assert "the token is not known to this server" in f"{refusal_error(client)}"
        with site.client("zeta-engine", tenant="zeta", unix=True) as client:
            client.wait_until_connected(60)
        assert site.server.log.count("the previous tokens stay valid") == 1
        tokens.unlink()
        tokens.parent.chmod(0o700)
        file.write_text(original.replace('name = "acme-far"', 'name = "renamed"'))
        file.chmod(0o600)
        file.replace(tokens)
        wait_until(lambda: "tokens read again" in site.server.log)

    def test_a_planted_certificate_is_not_used(self, site: Site) -> None:
        """A client that trusts only the planted authority finds no server."""
        directory = site.tokens.path.parent
        (directory / "evil").mkdir()
        evil = Authority(directory / "evil")
        pair = evil.issue("server")
        for name, source in (("server.key", pair.key), ("server.pem", pair.cert)):
            shutil.copy(source, directory / f"{name}.new")
            (directory / f"{name}.new").chmod(0o666)
            (directory / f"{name}.new").replace(directory / name)
        with site.client("zeta-engine", tenant="zeta") as client:
            client.wait_until_connected(60)
        assert "the previous one stays in use" in site.server.log
        with Client(site.server.tcp, namespace=namespace_of(PART), credentials=Credentials(ca=evil.ca)) as client:
            error_of(client, 1.0)


def limited(*limits: str) -> tuple[str, ...]:
    return ("prlimit", *limits)


def without_threads(threads: int) -> tuple[str, ...]:
    """A command that limits the threads of a user of its own, and leaves root its files."""
    return ("setpriv", "--ruid", "47110", "--bounding-set=-sys_admin,-sys_resource", *limited(f"--nproc={threads}"))


EXHAUST = """
import sys, threading
end = threading.Event()
try:
    while True:
        threading.Thread(target=end.wait, daemon=True).start()
except RuntimeError:
    print("exhausted", flush=True)
sys.stdin.read()
"""
"""Starts threads until the user may have no more, and keeps them until its input ends."""


class TestLimits:
    @pytest.mark.parametrize("count", [20, 64, 128])
    def test_too_few_descriptors(self, server: ServerProcess, count: int) -> None:
        """At 20, gRPC aborted with stacks of all threads in the log."""
        line = refused_line(server, 1, prefix=limited(f"--nofile={count}"))
        assert f"{count} open files are permitted, the server needs " in line

    @root_only
    @pytest.mark.parametrize("count", [2, 8, 11, 30])
    def test_too_few_threads(self, server: ServerProcess, count: int) -> None:
        line = refused_line(server, 1, prefix=without_threads(count))
        assert " more threads can be started, the server needs " in line
        assert f"ulimit -u ({count})" in line

    @pytest.mark.parametrize(
        ("limit", "name"),
        [("as=150000000", "RLIMIT_AS"), ("data=60000000", "RLIMIT_DATA"), ("stack=262144", "RLIMIT_STACK")],
    )
    def test_too_little_memory(self, server: ServerProcess, limit: str, name: str) -> None:
        assert name in refused_line(server, 1, prefix=limited(f"--{limit}"))

    def test_the_soft_limit_is_raised(self, server: ServerProcess) -> None:
        server._prefix = limited("--nofile=32:4096")
        server.start()
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (4096, 4096)
        assert "4096 open files are permitted, but the sessions of limits.max_sessions can need" in server.log

    def test_connections_beyond_the_descriptors(self, server: ServerProcess) -> None:
        """With the least permitted number of descriptors the server survives, and serves later."""
        server._prefix = limited("--nofile=170")
        server.start()
        host, port = server.tcp.split(":")
        with contextlib.ExitStack() as flood:
            for _ in range(400):
                with contextlib.suppress(OSError):
                    flood.enter_context(socket.create_connection((host, int(port)), 5))
            for _ in range(100):
                with contextlib.suppress(OSError):
                    local = flood.enter_context(socket.socket(socket.AF_UNIX))
                    local.settimeout(5)
                    local.connect(f"{server.path}")
            assert server.alive
        with Client(server.endpoint, namespace=namespace_of(PART), timeouts=TIMEOUTS) as client:
            client.wait_until_connected(60)
            assert server.alive

    @root_only
    def test_no_thread_is_left_for_a_running_server(self, server: ServerProcess) -> None:
        """Calls may fail, and further streams are refused, but the server survives."""
        server._prefix = without_threads(120)
        server.start()
        other = subprocess.Popen(
            [*without_threads(120), sys.executable, "-c", EXHAUST], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert other.stdout is not None
        assert other.stdout.readline() == b"exhausted\n"
        done: list[bool] = []

        def use(number: int) -> None:
            with contextlib.suppress(KVTierError, OSError):
                names = namespace_of(PART, model=f"{number}")
                with Client(server.tcp, namespace=names, timeouts=TIMEOUTS, credentials=INSECURE) as client:
                    client.wait_until_connected(10)
                    store_all(client, fresh(f"{number}"))
            done.append(True)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 24
        assert server.alive, server.log[-2000:]
        assert other.poll() is None
        other.communicate()
        with Client(server.endpoint, namespace=namespace_of(PART), timeouts=TIMEOUTS) as client:
            client.wait_until_connected(60)
        assert server.alive
