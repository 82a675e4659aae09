"""The life of a real server process: start, resources, end, and what remains afterwards."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from harness.launch import launch, refused_start
from harness.payloads import namespace_of
from harness.polling import wait_until
from harness.traffic import PART, assert_stored, store, wait_connected

from kvtier.client import Client
from kvtier.server.drain import DRAIN_SECONDS

MIB = 1 << 20

OWN_MEMORY_BYTES = 100 * MIB
"""Memory that the server may use besides the region, in bytes."""

SERVICES = {f"kvtier.v1.{name}" for name in ("SessionService", "CacheService", "TransferService", "AdminService")}


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yields a directory with a short name, because the path of a socket has a limit."""
    path = Path(tempfile.mkdtemp(prefix="kvt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class TestStart:
    def test_a_large_region_is_ready_at_once(self, directory: Path) -> None:
        """With 8 GiB the server uses less than 100 MB of its own, without numpy or torch."""
        with launch(directory, "--cpu-only", region="8GiB") as server:
            ready = server.wait_ready(backed=False)
            print(f"ready after {ready['seconds']:.3f} s")
            memory = server.memory()
            own = memory["RssAnon"] + memory["RssFile"]
            print(f"own memory: {own / MIB:.0f} MiB")
            assert own < OWN_MEMORY_BYTES
            maps = Path(f"/proc/{server.pid}/maps").read_text()
            for name in ("numpy", "torch"):
                assert f"/{name}/" not in maps
            assert server.end() == 0

    def test_the_server_imports_nothing_heavy(self) -> None:
        """The server imports neither numpy nor torch nor an engine."""
        code = (
            "import sys, kvtier.server.app, kvtier.server.cli, kvtier.tiers.lmdb.tier\n"
            "print([name for name in ('numpy', 'torch', 'transformers', 'vllm') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == "[]\n"

    def test_health_and_reflection(self, directory: Path) -> None:
        """The standard health and reflection services answer for every service of kvtier."""
        with launch(directory) as server, grpc.insecure_channel(f"unix:{directory}/s") as channel:
            server.wait_ready()
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", *SERVICES):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvtier.v1.TransferService"),
            ]
            listed, described = stub.ServerReflectionInfo(iter(requests), timeout=60)
            assert {service.name for service in listed.list_services_response.service} >= SERVICES
            file = FileDescriptorProto.FromString(described.file_descriptor_response.file_descriptor_proto[0])
            assert [service.name for service in file.service] == ["TransferService"]

    def test_serves_over_tcp(self, directory: Path) -> None:
        """On a free port of the loopback interface.

        A warning says that all users of the host can connect.
        """
        with launch(directory, "--insecure", listen="127.0.0.1:0") as server:
            [port] = server.wait_ready()["ports"]
            assert any("every user of this host" in line["event"] for line in server.log)
            assert_stored(f"127.0.0.1:{port}", store(f"127.0.0.1:{port}"))
            assert server.end() == 0

    def test_serves_the_same_blocks_on_several_addresses(self, directory: Path) -> None:
        with launch(directory, "--insecure", "--listen", "127.0.0.1:0", "--listen", f"unix:{directory}/s2") as server:
            [port] = server.wait_ready()["ports"]
            keys = store(f"unix:{directory}/s")
            assert_stored(f"unix:{directory}/s2", keys)
            assert_stored(f"127.0.0.1:{port}", keys)
            assert server.end() == 0
            assert not list(directory.glob("s*"))


class TestEnd:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_leaves_nothing_behind(self, directory: Path, number: int) -> None:
        """A signal ends the server with 0.

        Sockets and shared memory are gone, and blocks are back later.
        """
        before = set(Path("/dev/shm").iterdir())
        with launch(directory) as server:
            server.wait_ready()
            keys = store(f"unix:{directory}/s", flush=False)
            assert server.end(number) == 0
            assert server.log[-1]["event"] == "stopped"
            assert not [line for line in server.log if line["level"] in ("error", "critical")]
        assert {path.name for path in directory.iterdir()} == {"data", "log0"}
        assert set(Path("/dev/shm").iterdir()) <= before
        with launch(directory) as server:
            server.wait_ready()
            assert_stored(f"unix:{directory}/s", keys)

    def test_open_sessions_do_not_delay_the_end(self, directory: Path) -> None:
        """Their clients reconnect by themselves."""
        with Client(f"unix:{directory}/s", namespace=namespace_of(PART)) as client:
            with launch(directory) as server:
                server.wait_ready()
                wait_connected(client)
                started = time.monotonic()
                assert server.end() == 0
                print(f"ended after {time.monotonic() - started:.2f} s")
                assert time.monotonic() - started < DRAIN_SECONDS - 1, "waited for them"
            with launch(directory) as server:
                server.wait_ready()
                wait_connected(client)

    def test_a_signal_during_the_start_ends_the_server(self, directory: Path) -> None:
        """No socket is left."""
        with launch(directory, region="8GiB") as server:
            wait_until((directory / "s").exists, interval=0.001)
            assert server.end() == 0
        assert not list(directory.glob("s*"))

    def test_the_end_does_not_wait_for_the_region_to_be_backed(self, directory: Path) -> None:
        with launch(directory, "--cpu-only", region="8GiB") as server:
            server.wait_ready(backed=False)
            assert server.end() == 0
            assert "region backed" not in {line["event"] for line in server.log}


def test_the_log_says_where_blocks_are_kept(directory: Path) -> None:
    """And how much memory and disk the server may use."""
    with launch(directory) as server:
        server.wait_ready()
        [line] = [line for line in server.log if line["event"] == "storage"]
    assert (line["memory"], line["data_dir"]) == ("32.0 MiB", f"{directory}/data")
    [tier] = line["tiers"]
    assert re.fullmatch(rf"lmdb: at most \d+\.\d [MG]iB in {directory}/data/lmdb", tier)


class TestCollisions:
    def test_a_second_server_on_a_socket_is_refused(self, directory: Path) -> None:
        """The error says so, and the first server is unharmed."""
        with launch(directory) as server:
            server.wait_ready()
            keys = store(f"unix:{directory}/s")
            reason = refused_start(directory, "--data-dir", f"{directory}/data2")
            assert reason == f"unix:{directory}/s is in use: another server listens there"
            assert_stored(f"unix:{directory}/s", keys)

    def test_a_failed_start_does_not_say_stopped(self, directory: Path) -> None:
        """The last line of the log is the reason."""
        with launch(directory) as server:
            server.wait_ready()
            with launch(directory, "--data-dir", f"{directory}/data2") as second:
                assert second.process.wait(60) == 1
                events = [line["event"] for line in second.log]
            assert events[-1] == "cannot start"
            assert "stopped" not in events

    def test_a_second_server_on_a_data_directory_is_refused(self, directory: Path) -> None:
        """The first server is unharmed, and the second removes its socket."""
        with launch(directory) as server:
            server.wait_ready()
            keys = store(f"unix:{directory}/s")
            reason = refused_start(directory, listen=f"unix:{directory}/s2")
            assert "tier lmdb: " in reason
            assert "in use" in reason
            assert not list(directory.glob("s2*"))
            assert_stored(f"unix:{directory}/s", keys)

    @pytest.mark.parametrize("where", ["taken", "elsewhere", "no name"])
    def test_an_unusable_address_is_named(self, directory: Path, where: str) -> None:
        """The port is taken, the address belongs to another host, or the name is invalid."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = f"127.0.0.1:{other.getsockname()[1]}"
            address, why = {
                "taken": (taken, "Address already in use"),
                # TEST-NET-1, which no host has
                "elsewhere": ("192.0.2.1:7070", "Cannot assign requested address"),
                "no name": ("a..b:7070", "not the name of a host"),
            }[where]
            reason = refused_start(directory, "--insecure", listen=address)
        assert reason == f"cannot listen on {address}: {why}"

    def test_a_killed_server_can_be_replaced(self, directory: Path) -> None:
        """The next server replaces its sockets and serves its durable blocks."""
        with launch(directory) as server:
            server.wait_ready()
            keys = store(f"unix:{directory}/s")
            server.end(signal.SIGKILL)
            assert (directory / "s").exists()
        with launch(directory) as server:
            server.wait_ready()
            assert_stored(f"unix:{directory}/s", keys)
            assert server.end() == 0
            assert not list(directory.glob("s*"))

    @pytest.mark.parametrize("flag", ["--listen", "--metrics"])
    def test_a_used_port_is_named(self, directory: Path, flag: str) -> None:
        """For calls and for metrics; no socket is left."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            assert address in refused_start(directory, "--insecure", flag, address)
        assert not list(directory.glob("s*"))

    def test_an_unusable_data_directory_is_named(self, directory: Path) -> None:
        (directory / "file").write_text("")
        assert f"{directory}/file" in refused_start(directory, "--data-dir", f"{directory}/file/x")

    def test_an_unknown_tier_class_is_named(self, directory: Path) -> None:
        config = directory / "kvtier.toml"
        config.write_text('[[tiers]]\ntype = "nowhere.at_all:Tier"\n')
        assert "cannot import nowhere.at_all:Tier" in refused_start(directory, "--config", str(config))
