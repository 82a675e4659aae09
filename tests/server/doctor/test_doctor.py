"""`kvtier doctor`: set-ups that are broken for real, each named with what to do; and the verdicts where nothing is."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness.command_line import answer_of, kvtier
from harness.launch import launch

from kvtier import __version__
from kvtier.protos.v1 import admin_pb2_grpc, session_pb2, session_pb2_grpc
from kvtier.server.commands.doctor import CHECKS

NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make that set-up")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter and write to, for what another user runs."""
    directory = Path(tempfile.mkdtemp(prefix="kvtier-doctor-test-"))
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


def doctor(
    place: Path, *flags: str, code: int = 0, limits: str = "", unprivileged: bool = False, **environment: str
) -> dict[str, list[dict[str, str]]]:
    """Returns what doctor finds, by check; it must exit with this code.

    `limits` are what a shell sets before, like "-n 64"; `unprivileged` takes from root what it may do beyond others.
    """
    answer = answer_of(
        *("doctor", "--data-dir", f"{place}/data", "--region-size", "64MiB", "--no-disk-test", *flags),
        code=code,
        interpreter=_interpreter(limits, unprivileged=unprivileged),
        environment={"XDG_RUNTIME_DIR": f"{place}", "HOME": f"{place}"} | environment,
    )
    assert answer["ok"] is (code == 0)
    findings: dict[str, list[dict[str, str]]] = {}
    for finding in answer["findings"]:
        findings.setdefault(finding["check"], []).append(finding)
    return findings


def _interpreter(limits: str, *, unprivileged: bool) -> list[str]:
    interpreter = [sys.executable]
    if limits:
        interpreter = ["sh", "-c", f'ulimit {limits} && exec "$@"', "sh", *interpreter]
    if unprivileged and os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv is not here, and root may do everything")
        interpreter = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", *interpreter]
    return interpreter


def named(findings: dict[str, list[dict[str, str]]], check: str, verdict: str, seen: str, do: str) -> None:
    """Fails unless a check has this verdict, says what it saw, why that matters, and what to do."""
    for finding in findings[check]:
        if finding["verdict"] == verdict and seen in finding["seen"] and do in finding["do"]:
            assert finding["why"]
            return
    raise AssertionError(findings[check])


def socket_at(place: Path) -> Path:
    """Returns where this user's socket would be, in a directory that is there."""
    path = place / "kvtier" / "kvtier.sock"
    path.parent.mkdir(mode=0o700)
    return path


class TestBroken:
    def test_a_stale_socket(self, place: Path) -> None:
        """A server was killed: its socket is there, and nobody listens."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(socket_at(place)))
        named(doctor(place, code=1), "socket", "fail", "is stale", "kvtier serve")

    def test_a_killed_server_and_one_that_hangs(self, place: Path) -> None:
        """The same of a real one; while one is stopped it does not answer, which is a failure and not an absence."""
        endpoint = f"unix:{place}/s"
        with launch(place, "--cpu-only") as server:
            server.wait_ready()
            os.kill(server.pid, 19)  # SIGSTOP
            try:
                findings = doctor(place, "--endpoint", endpoint, "--timeout", "1", code=1)
            finally:
                os.kill(server.pid, 18)  # SIGCONT
            named(findings, "server", "fail", "no answer from", "does it hang")
            server.end(9)
        named(doctor(place, "--endpoint", endpoint, code=1), "socket", "fail", "is stale", "kvtier serve")

    def test_something_else_where_the_socket_should_be(self, place: Path) -> None:
        """A server would refuse to start."""
        socket_at(place).write_text("mine")
        named(doctor(place, code=1), "socket", "fail", "is no socket", "move it away")

    @root_only
    def test_another_users_socket_in_this_users_place(self, place: Path) -> None:
        """Whoever made it could answer in the server's stead."""
        path = socket_at(place)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(path))
            os.chown(path, NOBODY, NOBODY)
            named(doctor(place, code=1), "socket", "fail", f"belongs to user {NOBODY}", "find out who")

    def test_a_server_whose_socket_this_user_may_not_use(self, place: Path) -> None:
        """Every call would end in a miss."""
        with launch(place, "--cpu-only") as server:
            server.wait_ready()
            (place / "s").chmod(0)
            findings = doctor(place, "--endpoint", f"unix:{place}/s", code=1, unprivileged=True)
            named(findings, "socket", "fail", "mode 0000", "as the server's user")

    def test_a_server_of_another_version(self, place: Path) -> None:
        """It speaks a protocol that this side does not."""
        with _fake_server(place, "9.0.0", [7]) as endpoint:
            findings = doctor(place, "--endpoint", endpoint, code=1)
        named(findings, "versions", "fail", "speaks protocol 7", "install the same version")
        named(findings, "server", "fail", "of an older version", "start one")

    def test_a_server_of_another_version_that_speaks_the_same(self, place: Path) -> None:
        """That is worth a word, and no failure; here of one that has no AdminService, which is one."""
        with _fake_server(place, "9.0.0", [1]) as endpoint:
            findings = doctor(place, "--endpoint", endpoint, "--only", "versions")
        named(findings, "versions", "warn", f"kvtier here {__version__}", "install the same version")

    @root_only
    def test_a_full_file_system(self, place: Path) -> None:
        """Of a megabyte, in memory: next to nothing can be stored there, and it is no disk."""
        tiny = place / "tiny"
        tiny.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0777", "tmpfs", tiny], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip("tmpfs cannot be mounted here")
        try:
            (place / "c.toml").write_text(f'[[tiers]]\ntype = "lmdb"\npath = "{tiny}/store"\nsize = "1GiB"\n')
            findings = doctor(place, "--config", f"{place}/c.toml", code=1)
            named(findings, "disks", "fail", "room for 1.0 MiB", "make room")
            named(findings, "disks", "warn", "is on tmpfs", "to a disk")
            arguments = ("doctor", "--config", f"{place}/c.toml", "--region-size", "64MiB", "--only", "disks")
            [speed] = [each for each in answer_of(*arguments, code=1)["findings"] if "written" in each["seen"]]
            assert (speed["verdict"], list(tiny.iterdir())) == ("fail", [])
        finally:
            subprocess.run(["umount", tiny], check=True)

    def test_files_may_not_be_as_large_as_the_region(self, place: Path) -> None:
        """RLIMIT_FSIZE: a server that starts there ends with the first byte of its region."""
        findings = doctor(place, code=1, limits="-f 8192")
        named(findings, "shared_memory", "fail", "RLIMIT_FSIZE", "ulimit -f")

    def test_no_memory_may_be_locked(self, place: Path) -> None:
        """Nothing can be pinned. It is a warning: copies work, more slowly."""
        findings = doctor(place, limits="-l 0", unprivileged=True)
        named(findings, "memlock", "warn", "not a page can be locked", "ulimit -l")

    def test_too_few_descriptors(self, place: Path) -> None:
        """A server could not serve a handful of clients."""
        named(doctor(place, code=1, limits="-n 64"), "descriptors", "fail", "64 open files", "LimitNOFILE")
        named(doctor(place, limits="-n 512"), "descriptors", "warn", "max_sessions", "raise the hard limit")

    def test_a_directory_that_cannot_be_written_to(self, place: Path) -> None:
        """The server would not start."""
        (place / "data").mkdir(mode=0o555)
        findings = doctor(place, code=1, unprivileged=True)
        named(findings, "disks", "fail", f"user {os.getuid()} cannot write to", "chown")

    def test_hashes_that_do_not_agree(self, place: Path) -> None:
        """An engine with Python's own hashes, without a seed: running, or about to be started from here."""
        flags = ("--only", "hashes")
        findings = doctor(place, *flags, "--hash-algo", "builtin", code=1)
        named(findings, "hashes", "fail", "builtin, PYTHONHASHSEED is not set", "sha256")
        with _engine(place, "--prefix-caching-hash-algo", "builtin") as pid:
            named(doctor(place, *flags, code=1), "hashes", "fail", f"process {pid}: hashes by builtin", "sha256")
        with _engine(place, "--prefix_caching_hash_algo=xxhash") as pid:
            named(doctor(place, *flags, code=1), "hashes", "fail", f"process {pid}: hashes by xxhash", "sha256")
        with _engine(place, seed="1"), _engine(place, seed="2"):
            findings = doctor(place, *flags, code=1)
            named(findings, "hashes", "fail", "different PYTHONHASHSEED: '1', '2'", "alike")
        with _engine(place, "--prefix-caching-hash-algo=sha256_cbor") as pid:
            [finding] = [found for found in doctor(place, *flags)["hashes"] if f"process {pid}:" in found["seen"]]
            assert (finding["verdict"], "hashes by sha256_cbor" in finding["seen"]) == ("ok", True)

    def test_a_port_that_is_taken(self, place: Path) -> None:
        """A server could not start."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            findings = doctor(place, "--metrics", f"127.0.0.1:{port}", code=1)
        named(findings, "ports", "fail", f"127.0.0.1:{port}: Address already in use", "another port")

    def test_a_configuration_that_cannot_be_used(self, place: Path) -> None:
        """Each problem is a finding; the checks that need none go on."""
        findings = doctor(place, "--log-level", "loud", code=1)
        named(findings, "configuration", "fail", "loud", "kvtier config")
        assert findings["huge_pages"]

    def test_an_allocator_whose_memory_cannot_be_shared(self, place: Path) -> None:
        """Expandable segments, in the environment of the engine."""
        findings = doctor(place, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        named(findings, "cuda_ipc", "warn", "expandable_segments", "without expandable_segments")


class TestHealthy:
    def test_with_a_server_that_is_well(self, place: Path) -> None:
        """Every check has a verdict, and those that depend on the set-up are all well."""
        endpoint = f"unix:{place}/s"
        with launch(place, region="64MiB") as server:
            server.wait_ready()
            findings = doctor(place, "--endpoint", endpoint)
            text = kvtier("doctor", "--endpoint", endpoint, "--data-dir", f"{place}/data", "--no-disk-test").stdout
        assert list(findings) == list(CHECKS)
        machines = {"clock", "huge_pages", "memlock", "container", "descriptors"}  # what this one is like
        bad = [each for name, found in findings.items() for each in found if each["verdict"] != "ok"]
        assert {each["check"] for each in bad} <= machines | {"disks"}, bad
        assert "64.0 MiB of 64.0 MiB, in a memfd; /dev/shm is not used" in findings["shared_memory"][0]["seen"]
        assert f"both sides are {__version__}" in findings["versions"][0]["seen"]
        assert f"answers at {endpoint}" in findings["server"][0]["seen"]
        assert f"ok   socket: {place}/s is this user's, mode 0600" in text

    def test_without_a_server(self, place: Path) -> None:
        """That none runs is a warning; nothing is left behind by the measurement of disks."""
        (place / "data").mkdir()
        answer = answer_of(
            "doctor",
            "--data-dir",
            f"{place}/data",
            "--region-size",
            "64MiB",
            environment={"XDG_RUNTIME_DIR": f"{place}"},
        )
        verdicts = {each["check"]: each["verdict"] for each in answer["findings"]}
        assert (verdicts["socket"], verdicts["server"]) == ("warn", "warn")
        assert any("fdatasync" in each["seen"] for each in answer["findings"])
        assert list((place / "data").iterdir()) == []

    def test_a_server_that_asks_for_tokens(self, place: Path) -> None:
        """It is there, and nobody is told to start one: without a token that fails, with an engine's all is well."""
        endpoint = f"unix:{place}/s"
        made = kvtier("token", "new", "--role", "engine", "--tenant", "acme", "--file", f"{place}/tokens")
        (place / "engine").write_text(made.stdout)
        (place / "c.toml").write_text(f'[auth]\ntokens = "{place}/tokens"\nunix = true\n')
        with launch(place, "--cpu-only", "--config", f"{place}/c.toml") as server:
            server.wait_ready()
            findings = doctor(place, "--endpoint", endpoint, "--only", "server", code=1)
            named(findings, "server", "fail", "a token is needed", "--token-file")
            flags = ("--endpoint", endpoint, "--token-file", f"{place}/engine")
            findings = doctor(place, *flags, "--only", "server", "--only", "versions")
            assert f"answers at {endpoint}: version {__version__}" in findings["server"][0]["seen"]
            assert f"both sides are {__version__}" in findings["versions"][0]["seen"]

    def test_a_server_that_hangs_up(self, place: Path) -> None:
        """Something listens that does not speak gRPC in the clear: that is not called nobody."""
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as others:
            others.submit(_hang_up, listener)
            endpoint = "{}:{}".format(*listener.getsockname())
            findings = doctor(place, "--endpoint", endpoint, "--only", "server", code=1)
            named(findings, "server", "fail", "does it want TLS", "--ca")
            assert "hangs up" in kvtier("status", "--endpoint", endpoint, code=2).stderr
            listener.shutdown(socket.SHUT_RDWR)

    def test_a_server_that_is_drained(self, place: Path) -> None:
        """It is there and takes no new work."""
        with launch(place, "--cpu-only") as server:
            server.wait_ready()
            kvtier("drain", "--stay", "--wait", "--endpoint", f"unix:{place}/s")
            findings = doctor(place, "--endpoint", f"unix:{place}/s")
            named(findings, "server", "warn", "takes no new work", "--undo")

    def test_with_the_configuration_of_the_server_it_finds_the_server(self, place: Path) -> None:
        """Nobody has to say the address twice; said, it is that which counts."""
        (place / "c.toml").write_text(f'listen = ["127.0.0.1:0", "unix:{place}/s"]\ninsecure = true\n')
        with launch(place, "--cpu-only") as server:
            server.wait_ready()
            for flags, verdict in (((), "ok"), (("--endpoint", f"unix:{place}/none"), "warn")):
                findings = doctor(place, "--config", f"{place}/c.toml", "--only", "server", *flags)
                assert findings["server"][0]["verdict"] == verdict

    def test_wrong_usage(self) -> None:
        """A check that is none, an endpoint that is none: 2."""
        assert "there are configuration, socket" in kvtier("doctor", "--only", "luck", code=2).stderr
        kvtier("doctor", "--endpoint", "nonsense", code=2)


def _hang_up(listener: socket.socket) -> None:
    """Closes each connection once something was said, as TLS does where what was said is none, until the listener ends."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)


@contextlib.contextmanager
def _fake_server(place: Path, version: str, protocols: list[int]) -> Iterator[str]:
    """Serves capabilities, and nothing else."""

    class Session(session_pb2_grpc.SessionServiceServicer):
        def Capabilities(self, _: Any, context: grpc.ServicerContext) -> session_pb2.CapabilitiesResponse:  # noqa: N802
            return session_pb2.CapabilitiesResponse(server_version=version, protocol_versions=protocols)

    server = grpc.server(ThreadPoolExecutor(2))
    session_pb2_grpc.add_SessionServiceServicer_to_server(Session(), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin_pb2_grpc.AdminServiceServicer(), server)
    endpoint = f"unix:{place}/fake.sock"
    server.add_insecure_port(endpoint)
    server.start()
    (place / "fake.sock").chmod(0o600)
    try:
        yield endpoint
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def _engine(place: Path, *flags: str, seed: str | None = None) -> Iterator[int]:
    """Runs what has the command line and the environment of a vLLM server, and does nothing."""
    script = place / "vllm"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(120)\n")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
    command = [sys.executable, os.fspath(script), "serve", "some/model", *flags]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()
