"""The shared stores of the demo of a fleet: a Redis cluster and an S3 store, with own addresses."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from processes import Child, DemoError, free_ports

from kvtier.tiers.remote.object_store import StoreUnavailableError
from kvtier.tiers.remote.resp import ErrorAnswer, RespConnection, command

__all__ = ["CREDENTIALS", "ObjectStore", "RedisCluster", "find_program"]

SLOTS = 16384
BUCKET = "blocks"
REGION = "us-east-1"
ANSWER_SECONDS = 10.0
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "kvtier-demo", "AWS_SECRET_ACCESS_KEY": "only-for-this-demo"}
"""Environment of the S3 store, which takes them as its own, and of the kvtier servers."""


def find_program(names: Sequence[str], folders: Sequence[Path], package: str) -> str:
    """Returns the path of the first program that is in the folders or on the path."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    raise DemoError(f"the program {' or '.join(names)} is missing; `make demo-fleet` installs the package {package}")


class RedisNode(Child):
    """A node of the cluster. It has no persistence, and it evicts."""

    end_signal = signal.SIGKILL

    def __init__(self, program: str, address: str, directory: Path) -> None:
        directory.mkdir()
        self.address = address
        self.port, self.bus_port = free_ports(address, 2)
        options = ["--bind", address, "--port", self.port, "--cluster-port", self.bus_port, "--dir", directory]
        options += ["--save", "", "--appendonly", "no", "--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru"]
        options += ["--cluster-enabled", "yes", "--cluster-announce-ip", address]
        options += ["--cluster-require-full-coverage", "no"]
        super().__init__(f"Redis at {address}:{self.port}", [program, *map(str, options)], directory / "redis.log")

    def ask(self, *words: object) -> Any:
        """Returns the node's answer to a command."""
        with socket.create_connection((self.address, self.port), timeout=ANSWER_SECONDS) as sock:
            connection = RespConnection(sock)
            connection.set_deadline(time.monotonic() + ANSWER_SECONDS)
            connection.send([command(*(str(word).encode() for word in words))])
            answer = connection.read()
        if isinstance(answer, ErrorAnswer):
            raise DemoError(f"{self.name}: {answer.text}")
        return answer

    def answers(self) -> bool:
        """Returns whether the node runs."""
        try:
            return bool(self.ask("PING"))
        except (OSError, StoreUnavailableError):
            return False

    def is_whole(self, nodes: int) -> bool:
        """Returns whether the node knows all slots and all nodes."""
        known = self.ask("CLUSTER", "INFO")
        return all(text in known for text in (b"cluster_state:ok", b"cluster_known_nodes:%d" % nodes))


class RedisCluster:
    """Cluster with a node at each address. The nodes have equal parts of the slots, no replicas."""

    def __init__(self, program: str, addresses: Sequence[str], directory: Path) -> None:
        self.nodes = [
            RedisNode(program, address, directory / f"redis-{number}") for number, address in enumerate(addresses)
        ]
        self._running = ExitStack()

    @property
    def url(self) -> str:
        return "valkey://" + ",".join(f"{node.address}:{node.port}" for node in self.nodes)

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            for node in self.nodes:
                starting.enter_context(node)
                node.wait_until(node.answers, "the start")
            first, count = self.nodes[0], len(self.nodes)
            for number, node in enumerate(self.nodes):
                node.ask("CLUSTER", "ADDSLOTSRANGE", SLOTS * number // count, SLOTS * (number + 1) // count - 1)
                node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                if node is not first:
                    node.ask("CLUSTER", "MEET", first.address, first.port, first.bus_port)
            for node in self.nodes:
                node.wait_until(lambda node=node: node.is_whole(count), "the start of the cluster")
            self._running = starting.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._running.__exit__(*error)

    def block_counts(self) -> list[int]:
        """Returns the number of blocks at each node."""
        return [node.ask("DBSIZE") for node in self.nodes]


class ObjectStore(Child):
    """SeaweedFS: master, volume server, filer and S3 gateway in one process."""

    end_signal = signal.SIGKILL  # an orderly end takes 25 seconds

    def __init__(self, program: str, address: str, directory: Path) -> None:
        self._files = directory / "s3"
        self._files.mkdir()
        names = ("master", "volume", "filer", "s3")
        ports = free_ports(address, 2 * len(names))
        self.endpoint = f"http://{address}:{ports[names.index('s3')]}"
        options = [f"-dir={self._files}", f"-ip={address}", f"-ip.bind={address}", "-filer", "-s3"]
        options += [f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)]
        options += [f"-{name}.port.grpc={port}" for name, port in zip(names, ports[len(names) :], strict=True)]
        options += ["-master.telemetry=false", "-master.volumeSizeLimitMB=128", "-volume.max=64"]
        options += ["-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        super().__init__("SeaweedFS", [program, "server", *options], directory / "seaweedfs.log", CREDENTIALS)

    @property
    def options(self) -> dict[str, str]:
        """Options of a tier at this store."""
        return {"url": f"s3://{BUCKET}/kv", "endpoint": self.endpoint, "region": REGION}

    def start(self) -> None:
        """Starts the store and waits until it has stored an object, which makes the bucket."""
        super().start()
        self.wait_until(self._accepts, "the start")

    def _accepts(self) -> bool:
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region=REGION,
            access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            client_options={"allow_http": True, "timeout": f"{ANSWER_SECONDS:.0f}s"},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.put(store, "first", b"x")
        except (obstore.exceptions.BaseError, FileNotFoundError):
            return False
        return True
