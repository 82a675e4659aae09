"""`kvtier doctor`: broken set-ups with the advice for each, and the verdicts of a sound one."""

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
from harness.command_line import json_output, kvtier
from harness.launch import launch

from kvtier import __version__
from kvtier.protos.v1 import admin_pb2_grpc, session_pb2, session_pb2_grpc
from kvtier.server.commands.doctor import CHECKS

OTHER_UID = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make that set-up")


@pytest.fixture
def place() -> Iterator[Path]:
    """Yields a directory that every user can enter and write to, for commands of another user."""
    directory = Path(tempfile.mkdtemp(prefix="kvtier-doctor-test-"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


def doctor(
    place: Path, *flags: str, code: int = 0, limits: str = "", unprivileged: bool = False, **environment: str
) -> dict[str, list[dict[str, str]]]:
    """Returns the findings of doctor by check; the exit code must be this.

    `limits` are arguments of the shell's `ulimit`, such as "-n 64". `unprivileged` removes root's
    capabilities.
    """
    answer = json_output(
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
    """Returns what runs Python with these limits; nothing if a fork will do."""
    interpreter = []
    if limits:
        interpreter = ["sh", "-c", f'ulimit {limits} && exec "$@"', "sh", sys.executable]
    if unprivileged and os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv is not here, and root may do everything")
        interpreter = interpreter or [sys.executable]
        interpreter = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", *interpreter]
    return interpreter


def named(findings: dict[str, list[dict[str, str]]], check: str, verdict: str, seen: str, do: str) -> None:
    """Checks verdict, observation, reason and advice of a finding."""
    for finding in findings[check]:
        if finding["verdict"] == verdict and seen in finding["seen"] and do in finding["do"]:
            assert finding["why"]
            return
    raise AssertionError(findings[check])


def socket_at(place: Path) -> Path:
    """Returns the path of this user's socket, in an existing directory."""
    path = place / "kvtier" / "kvtier.sock"
    path.parent.mkdir(mode=0o700)
    return path


class TestBroken:
    def test_a_stale_socket(self, place: Path) -> None:
        """The server was killed: its socket exists, and no process listens."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(socket_at(place)))
        named(doctor(place, code=1), "socket", "fail", "is stale", "kvtier serve")

    def test_a_killed_or_stopped_server(self, place: Path) -> None:
        """A stopped server does not answer, which is a failure and not an absence."""
        endpoint = f"unix:{place}/s"
        with launch(place, "--cpu-only") as server:
            server.wait_ready()
            os.kill(server.pid, 19)  # SIGSTOP
            try:
                findings = doctor(place, "--endpoint", endpoint, "--timeout", "1", code=1)
            finally:
                os.kill(server.pid, 18)  # SIGCONT
            named(findings, "server", "fail", "no answer from", "check whether the server hangs")
            server.end(9)
        named(doctor(place, "--endpoint", endpoint, code=1), "socket", "fail", "is stale", "kvtier serve")

    def test_a_file_at_the_path_of_the_socket(self, place: Path) -> None:
        """A server would refuse to start."""
        socket_at(place).write_text("mine")
        named(doctor(place, code=1), "socket", "fail", "is not a socket", "move the file")

    @root_only
    def test_a_socket_that_belongs_to_another_user(self, place: Path) -> None:
        """The other user could answer in place of the server."""
        path = socket_at(place)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(path))
            os.chown(path, OTHER_UID, OTHER_UID)
            named(doctor(place, code=1), "socket", "fail", f"belongs to user {OTHER_UID}", "find out who")

    def test_a_socket_without_permission(self, place: Path) -> None:
        """Every call would be a miss."""
        with launch(place, "--cpu-only") as server:
            server.wait_ready()
            (place / "s").chmod(0)
            findings = doctor(place, "--endpoint", f"unix:{place}/s", code=1, unprivileged=True)
            named(findings, "socket", "fail", "mode 0000", "as the server's user")

    def test_a_server_with_an_unknown_protocol(self, place: Path) -> None:
        with _fake_server(place, "9.0.0", [7]) as endpoint:
            findings = doctor(place, "--endpoint", endpoint, code=1)
        named(findings, "versions", "fail", "supports protocol 7", "install the same version")
        named(findings, "server", "fail", "its version is too old", "start one")

    def test_another_version_with_the_same_protocol(self, place: Path) -> None:
        """The version is a warning; the missing AdminService is a failure."""
        with _fake_server(place, "9.0.0", [2]) as endpoint:
            findings = doctor(place, "--endpoint", endpoint, "--only", "versions")
        named(findings, "versions", "warn", f"kvtier here is {__version__}", "install the same version")

    @root_only
    def test_a_full_file_system(self, place: Path) -> None:
        """The file system has a megabyte, in memory, and almost no free space."""
        tiny = place / "tiny"
        tiny.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "tmpfs", tiny], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip("tmpfs cannot be mounted here")
        try:
            (place / "c.toml").write_text(f'[[tiers]]\ntype = "lmdb"\npath = "{tiny}/store"\nsize = "1GiB"\n')
            findings = doctor(place, "--config", f"{place}/c.toml", code=1)
            named(findings, "disks", "fail", "room for 1.0 MiB", "free disk space")
            named(findings, "disks", "warn", "is on tmpfs", "to a disk")
            arguments = ("doctor", "--config", f"{place}/c.toml", "--region-size", "64MiB", "--only", "disks")
            [speed] = [each for each in json_output(*arguments, code=1)["findings"] if "written" in each["seen"]]
            assert (speed["verdict"], list(tiny.iterdir())) == ("fail", [])
        finally:
            subprocess.run(["umount", tiny], check=True)

    def test_a_file_size_limit_below_the_region(self, place: Path) -> None:
        """With such an RLIMIT_FSIZE a server ends at the first byte of its region."""
        findings = doctor(place, code=1, limits="-f 8192")
        named(findings, "shared_memory", "fail", "RLIMIT_FSIZE", "ulimit -f")

    def test_a_limit_of_locked_memory_of_zero(self, place: Path) -> None:
        """No page can be pinned. It is a warning, because copies still work, but more slowly."""
        findings = doctor(place, limits="-l 0", unprivileged=True)
        named(findings, "memlock", "warn", "no page can be locked", "ulimit -l")

    def test_too_few_descriptors(self, place: Path) -> None:
        """The server could serve a few clients only."""
        named(doctor(place, code=1, limits="-n 64"), "limits", "fail", "64 open files", "LimitNOFILE")
        named(doctor(place, limits="-n 512"), "limits", "warn", "max_sessions", "raise the hard limit")

    def test_a_directory_without_write_permission(self, place: Path) -> None:
        """The server would not start."""
        (place / "data").mkdir(mode=0o555)
        findings = doctor(place, code=1, unprivileged=True)
        named(findings, "disks", "fail", f"user {os.getuid()} cannot write to", "chown")

    def test_engines_with_incompatible_hashes(self, place: Path) -> None:
        """The engine uses Python's hashes without a seed.

        It is running, or starts from this environment.
        """
        flags = ("--only", "hashes")
        findings = doctor(place, *flags, "--hash-algo", "builtin", code=1)
        named(findings, "hashes", "fail", "builtin, PYTHONHASHSEED is not set", "sha256")
        with _engine(place, "--prefix-caching-hash-algo", "builtin") as pid:
            named(doctor(place, *flags, code=1), "hashes", "fail", f"process {pid}: hash algorithm builtin", "sha256")
        with _engine(place, "--prefix_caching_hash_algo=xxhash") as pid:
            named(doctor(place, *flags, code=1), "hashes", "fail", f"process {pid}: hash algorithm xxhash", "sha256")
        with _engine(place, seed="1"), _engine(place, seed="2"):
            findings = doctor(place, *flags, code=1)
            named(findings, "hashes", "fail", "different PYTHONHASHSEED: '1', '2'", "same value")
        with _engine(place, "--prefix-caching-hash-algo=sha256_cbor") as pid:
            [finding] = [found for found in doctor(place, *flags)["hashes"] if f"process {pid}:" in found["seen"]]
            assert (finding["verdict"], "hash algorithm sha256_cbor" in finding["seen"]) == ("ok", True)

    def test_a_used_port(self, place: Path) -> None:
        """A server could not start."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            findings = doctor(place, "--metrics", f"127.0.0.1:{port}", code=1)
        named(findings, "ports", "fail", f"127.0.0.1:{port}: Address already in use", "another port")

    def test_an_invalid_configuration(self, place: Path) -> None:
        """Each error is a finding; checks that need no configuration run."""
        findings = doctor(place, "--log-level", "loud", code=1)
        named(findings, "configuration", "fail", "loud", "kvtier config")
        assert findings["huge_pages"]

    def test_expandable_segments_in_an_engine(self, place: Path) -> None:
        """CUDA memory of such an allocator cannot be shared."""
        findings = doctor(place, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        named(findings, "cuda_ipc", "warn", "expandable_segments", "without expandable_segments")


class TestHealthy:
    def test_with_a_sound_server(self, place: Path) -> None:
        """Every check has a verdict, and those that depend on the set-up are all ok."""
        endpoint = f"unix:{place}/s"
        with launch(place, region="64MiB") as server:
            server.wait_ready()
            findings = doctor(place, "--endpoint", endpoint)
            text = kvtier("doctor", "--endpoint", endpoint, "--data-dir", f"{place}/data", "--no-disk-test").stdout
        assert list(findings) == list(CHECKS)
        # depend on the machine
        machines = {"clock", "huge_pages", "memlock", "container", "limits"}
        bad = [each for name, found in findings.items() for each in found if each["verdict"] != "ok"]
        assert {each["check"] for each in bad} <= machines | {"disks"}, bad
        assert "64.0 MiB of 64.0 MiB, in a memfd; /dev/shm is not used" in findings["shared_memory"][0]["seen"]
        assert f"both sides are {__version__}" in findings["versions"][0]["seen"]
        assert f"answers at {endpoint}" in findings["server"][0]["seen"]
        assert f"ok   socket: {place}/s is this user's, mode 0600" in text

    def test_without_a_server(self, place: Path) -> None:
        """Its absence is a warning; the disk measurement leaves no files."""
        (place / "data").mkdir()
        answer = json_output(
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

    def test_a_server_that_needs_tokens(self, place: Path) -> None:
        """Without a token the check fails but does not suggest a start.

        With an engine's token all is ok.
        """
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

    def test_a_server_that_speaks_tls(self, place: Path) -> None:
        """A listener that does not speak gRPC in the clear does not count as absent."""
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as others:
            others.submit(_hang_up, listener)
            endpoint = "{}:{}".format(*listener.getsockname())
            findings = doctor(place, "--endpoint", endpoint, "--only", "server", code=1)
            named(findings, "server", "fail", "does it need TLS", "--ca")
            assert "closed the connection" in kvtier("status", "--endpoint", endpoint, code=2).stderr
            listener.shutdown(socket.SHUT_RDWR)

    def test_a_drained_server(self, place: Path) -> None:
        """The server runs and accepts no new work."""
        with launch(place, "--cpu-only") as server:
            server.wait_ready()
            kvtier("drain", "--stay", "--wait", "--endpoint", f"unix:{place}/s")
            findings = doctor(place, "--endpoint", f"unix:{place}/s")
            named(findings, "server", "warn", "refuses new work", "--undo")

    def test_the_address_comes_from_the_configuration(self, place: Path) -> None:
        """An explicit address overrides it."""
        (place / "c.toml").write_text(f'listen = ["127.0.0.1:0", "unix:{place}/s"]\ninsecure = true\n')
        with launch(place, "--cpu-only") as server:
            server.wait_ready()
            for flags, verdict in (((), "ok"), (("--endpoint", f"unix:{place}/none"), "warn")):
                findings = doctor(place, "--config", f"{place}/c.toml", "--only", "server", *flags)
                assert findings["server"][0]["verdict"] == verdict

    def test_unknown_checks_and_endpoints_are_wrong_usage(self) -> None:
        """The exit code is 2."""
        assert "the checks are configuration, socket" in kvtier("doctor", "--only", "luck", code=2).stderr
        kvtier("doctor", "--endpoint", "nonsense", code=2)


def _hang_up(listener: socket.socket) -> None:
    """Closes each connection after its first bytes, as TLS does after an invalid record."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)


@contextlib.contextmanager
def _fake_server(place: Path, version: str, protocols: list[int]) -> Iterator[str]:
    """Serves capabilities only."""

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
    """Runs a process with the command line and environment of a vLLM server, which does nothing."""
    script = place / "vllm"
    script.write_text("import signal\nprint('up', flush=True)\nsignal.pause()\n")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
    command = [sys.executable, os.fspath(script), "serve", "some/model", *flags]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_settings_other_than_the_servers_are_named(place: Path) -> None:
    """Without --config, doctor looks at defaults, which a running server may not have."""
    config = place / "peers.toml"
    config.write_text('insecure = true\n[peers]\nservers = ["127.0.0.1:7450"]\n')
    with launch(place, "--cpu-only", "--config", str(config)) as server:
        server.wait_ready()
        other = doctor(place, "--only", "configuration", "--endpoint", f"unix:{place}/s")
        same = doctor(
            place,
            *("--only", "configuration", "--endpoint", f"unix:{place}/s", "--cpu-only", "--region-size", "32MiB"),
            *("--config", str(config)),
        )

    difference = "region_size is 64.0 MiB here, 32.0 MiB there; tiers is lmdb here, peers there"
    named(other, "configuration", "warn", difference, "with the server's --config")
    assert [finding["verdict"] for finding in same["configuration"]] == ["ok"]


def test_fsck_warns_if_a_server_runs_with_other_tiers(place: Path) -> None:
    """Without --config, --data-dir and --online, fsck checks the default tiers."""
    environment = {"XDG_RUNTIME_DIR": f"{place}", "XDG_DATA_HOME": f"{place}/home", "HOME": f"{place}"}
    socket_path = place / "kvtier" / "kvtier.sock"
    socket_path.parent.mkdir(mode=0o700)
    with launch(place, "--cpu-only", listen=f"unix:{socket_path}") as server:
        server.wait_ready()
        guessed = kvtier("fsck", environment=environment, code=4).stderr
        named_here = kvtier("fsck", "--data-dir", f"{place}/data", environment=environment, code=4).stderr
    alone = kvtier("fsck", environment=environment, code=4).stderr

    assert f"a server runs at unix:{socket_path} (tiers: none)" in guessed
    assert f"checks the default tiers in {place}/home/kvtier" in guessed
    assert "use --online" in guessed
    assert "a server runs" not in named_here + alone
