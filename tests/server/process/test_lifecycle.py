"""The life of a real server process: how it starts, what it takes, and what it leaves behind."""

from __future__ import annotations

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
from harness.traffic import PART, assert_stored, store, wait_connected

from kvtier.client import Client
from kvtier.server.drain import DRAIN_SECONDS

MIB = 1 << 20

OWN_MEMORY_BYTES = 100 * MIB
"""What the server may take besides the region (issue 2)."""

SERVICES = {f"kvtier.v1.{name}" for name in ("SessionService", "CacheService", "TransferService", "AdminService")}


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short name: a socket's path has a limit."""
    path = Path(tempfile.mkdtemp(prefix="kvt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class TestStart:
    def test_large_region(self, directory: Path) -> None:
        """With a region of 8 GiB it is ready at once, and takes under 100 MB of its own, without numpy or torch."""
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

    def test_imports(self) -> None:
        """The whole server is imported without numpy, torch and engines."""
        code = (
            "import sys, kvtier.server.app, kvtier.server.cli, kvtier.tiers.lmdb.tier\n"
            "print([name for name in ('numpy', 'torch', 'transformers', 'vllm') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == "[]\n"

    def test_health_and_reflection(self, directory: Path) -> None:
        """The standard health and reflection services answer, for every service of ours."""
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

    def test_tcp(self, directory: Path) -> None:
        """It listens on a free TCP port of the loopback, warns that it is open to this host, and serves blocks there."""
        with launch(directory, "--insecure", listen="127.0.0.1:0") as server:
            [port] = server.wait_ready()["ports"]
            assert any("every user of this host" in line["event"] for line in server.log)
            assert_stored(f"127.0.0.1:{port}", store(f"127.0.0.1:{port}"))
            assert server.end() == 0

    def test_several_addresses(self, directory: Path) -> None:
        """It serves the same blocks on all of its addresses."""
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
        """A signal ends it with 0: sockets and shared memory are gone, what was stored is there again afterwards."""
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

    def test_with_open_sessions(self, directory: Path) -> None:
        """Sessions that stay open do not hold up the end, and their clients come back by themselves."""
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

    def test_second_signal_while_starting(self, directory: Path) -> None:
        """A signal that comes before it is ready ends it all the same, and leaves no socket."""
        with launch(directory, region="8GiB") as server:
            while not (directory / "s").exists():
                time.sleep(0.001)
            assert server.end() == 0
        assert not list(directory.glob("s*"))

    def test_while_the_region_is_being_backed(self, directory: Path) -> None:
        """The end does not wait for a large region to be backed."""
        with launch(directory, "--cpu-only", region="8GiB") as server:
            server.wait_ready(backed=False)
            assert server.end() == 0
            assert "region backed" not in {line["event"] for line in server.log}


class TestCollisions:
    def test_same_socket(self, directory: Path) -> None:
        """A second server on the same socket says so and leaves the first unharmed."""
        with launch(directory) as server:
            server.wait_ready()
            keys = store(f"unix:{directory}/s")
            reason = refused_start(directory, "--data-dir", f"{directory}/data2")
            assert reason == f"unix:{directory}/s is in use: another server listens there"
            assert_stored(f"unix:{directory}/s", keys)

    def test_same_data(self, directory: Path) -> None:
        """A second server on the same data directory says so, unharmful to the first, and takes its own socket away."""
        with launch(directory) as server:
            server.wait_ready()
            keys = store(f"unix:{directory}/s")
            reason = refused_start(directory, listen=f"unix:{directory}/s2")
            assert "tier lmdb: " in reason
            assert "in use" in reason
            assert not list(directory.glob("s2*"))
            assert_stored(f"unix:{directory}/s", keys)

    @pytest.mark.parametrize("where", ["taken", "elsewhere", "no name"])
    def test_same_port(self, directory: Path, where: str) -> None:
        """A port that another program has, an address that is another host's: it says which."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = f"127.0.0.1:{other.getsockname()[1]}"
            address, why = {
                "taken": (taken, "Address already in use"),
                "elsewhere": ("192.0.2.1:7070", "Cannot assign requested address"),  # TEST-NET-1: nobody's
                "no name": ("a..b:7070", "not the name of a host"),
            }[where]
            reason = refused_start(directory, "--insecure", listen=address)
        assert reason == f"cannot listen on {address}: {why}"

    def test_after_a_kill(self, directory: Path) -> None:
        """Sockets of a killed server are replaced, and what was durable is there."""
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
    def test_port_in_use(self, directory: Path, flag: str) -> None:
        """A port that is taken is an error that names it, for calls and for metrics; no socket stays behind."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            assert address in refused_start(directory, "--insecure", flag, address)
        assert not list(directory.glob("s*"))

    def test_unusable_data_directory(self, directory: Path) -> None:
        """A data directory that cannot be made is an error that names it."""
        (directory / "file").write_text("")
        assert f"{directory}/file" in refused_start(directory, "--data-dir", f"{directory}/file/x")

    def test_unknown_tier(self, directory: Path) -> None:
        """A tier's class that cannot be imported is an error that names it."""
        config = directory / "kvtier.toml"
        config.write_text('[[tiers]]\ntype = "nowhere.at_all:Tier"\n')
        assert "cannot import nowhere.at_all:Tier" in refused_start(directory, "--config", str(config))
