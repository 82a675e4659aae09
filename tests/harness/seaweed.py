"""A SeaweedFS server with an S3 gateway as a child process."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.child_server import BucketServer
from harness.polling import wait_until
from harness.ports import ReservedPort

__all__ = ["BUCKET", "SeaweedServer", "needs_seaweed"]

BUCKET = "blocks"
"""SeaweedFS refuses names with fewer than 3 characters."""
_KEYS = ("ABCDEFGHIJKLMNOPQRST", "secret" * 6)


def _program() -> str | None:
    return shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def needs_seaweed() -> None:
    """Skips a test if the server or the client library is not installed."""
    if _program() is None or importlib.util.find_spec("obstore") is None:
        pytest.skip("needs SeaweedFS and obstore: make test-remote")


class SeaweedServer(BucketServer):
    """Server on ports of the loopback interface; `start` may be called again after `kill`.

    One process is master, volume server, filer and S3 gateway.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports = {name: ReservedPort() for name in ("master", "volume", "filer", "s3")}
        self._rpc_ports = {name: ReservedPort() for name in self._ports}
        self._starts = 0
        self.credentials = directory / "credentials"
        self.credentials.write_text(f"[default]\naws_access_key_id = {_KEYS[0]}\naws_secret_access_key = {_KEYS[1]}\n")
        identity = {"name": "kv", "actions": ["Admin", "Read", "Write", "List"]}
        reader = {"name": "reader", "actions": ["Read", "List"]}
        pairs = [{"accessKey": _KEYS[0], "secretKey": _KEYS[1]}], [{"accessKey": "R" * 20, "secretKey": _KEYS[1]}]
        identities = [identity | {"credentials": pairs[0]}, reader | {"credentials": pairs[1]}]
        self._users = directory / "users.json"
        self._users.write_text(json.dumps({"identities": identities}))
        self.reader = directory / "reader"
        self.reader.write_text(self.credentials.read_text().replace(_KEYS[0], "R" * 20))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3'].number}"

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/kv"

    def options(self) -> dict[str, Any]:
        """Returns the options of a tier at this store."""
        return {"url": self.url, "endpoint": self.endpoint, "credentials_file": self.credentials}

    def lmcache_settings(self) -> dict[str, Any]:
        """Returns the settings of LMCache's L2 adapter for this store.

        The adapter expects the bucket in the name of the host. Here it is in the path, as the
        beginning of the model's name.
        """
        return {
            "type": "s3",
            "model": f"{BUCKET}/lmcache",
            "s3_endpoint": self.endpoint.removeprefix("http://"),
            "s3_region": "us-east-1",
            "s3_prefer_http2": False,
            "disable_tls": True,
            "aws_access_key_id": _KEYS[0],
            "aws_secret_access_key": _KEYS[1],
        }

    def start(self) -> None:
        """Starts the server with an empty store. If it runs, deletes all objects."""
        if self._process is not None:
            self.clear()
            return
        program = _program()
        assert program
        self._starts += 1
        data = self._directory / f"data{self._starts}"
        data.mkdir()
        command = [program, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
        command += [f"-{name}.port={port.number}" for name, port in self._ports.items()]
        command += [f"-{name}.port.grpc={port.number}" for name, port in self._rpc_ports.items()]
        command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=128", "-volume.max=64"]
        command += [f"-s3.config={self._users}", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        log = (self._directory / "weed.log").open("ab")
        with log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._directory)
        wait_until(self._answers, interval=0.1)

    def client(self) -> Any:
        from obstore.store import S3Store

        return S3Store(
            BUCKET,
            prefix="kv",
            config={
                "endpoint": self.endpoint,
                "region": "us-east-1",
                "access_key_id": _KEYS[0],
                "secret_access_key": _KEYS[1],
            },
            client_options={"allow_http": True, "timeout": "20s"},
            retry_config={"max_retries": 0},
        )

    def end(self) -> None:
        """Kills the server and releases its ports."""
        self.kill()
        for port in (*self._ports.values(), *self._rpc_ports.values()):
            port.close()

    def _answers(self) -> bool:
        """Writes an object, which creates the bucket and the first volumes: that takes seconds."""
        import obstore

        assert self._process
        assert self._process.poll() is None, "weed has ended"
        try:
            for number in range(3):
                obstore.put(self.client(), f"first{number}", b"x" * (1 << 20))
            obstore.delete(self.client(), [f"first{number}" for number in range(3)])
        except (obstore.exceptions.BaseError, FileNotFoundError):
            return False
        return True
