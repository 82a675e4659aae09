"""Starts and ends the process with Mooncake's client (`mooncake_child.py`)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...protos.endpoint import EndpointError, parse_endpoint
from ..secondary_tier import TierOpenError
from ..storage.service_signals import start_module
from .limits import AvoidedNames
from .mooncake_child import READY
from .object_store import StoreUnavailableError

__all__ = [
    "P2P",
    "MooncakeChild",
    "MooncakeProcess",
    "MooncakeSettings",
    "Region",
    "master_address",
    "require_mooncake",
]

_MODULE = "kvtier.tiers.remote.mooncake_child"
P2P = "P2PHANDSHAKE"
"""Value of `metadata` for nodes that exchange their addresses directly."""


START_SECONDS = 30.0
"""Time for the start of the process, besides a second for each GiB of the region."""
REACH_SECONDS = 2.0
"""Time for a connection to the master, which shows that it is there."""
LATE_CALLS = 8
"""The process is replaced after this many calls that move no bytes and have not ended in time."""
SUSPECT_SECONDS = 10.0
"""Mooncake's master reports the values of a dead node as present for this time, by default."""


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """Where Mooncake is, and how bytes reach its nodes.

    Attributes:
        master: HOST:PORT of the master.
        metadata: `P2PHANDSHAKE`, or the URL of a metadata server.
        protocol: `tcp` or `rdma`.
        device: names of RDMA devices, separated by commas; None: Mooncake chooses.
        local_host: name or address of this host; None: the address that the master sees.
        log: file for the messages of Mooncake's library.
    """

    master: str
    metadata: str = P2P
    protocol: str = "tcp"
    device: str | None = None
    local_host: str | None = None
    log: Path | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """The host region: its pools (`SecondaryTier.use_region`), mapped at `address`."""

    pools: Sequence[tuple[int, int, int]]
    address: int
    size_bytes: int


def master_address(text: str) -> tuple[str, int]:
    """Returns host and port. Raises ValueError."""
    with contextlib.suppress(EndpointError):
        if (endpoint := parse_endpoint(text)).port:
            return endpoint.host, endpoint.port
    raise ValueError("must be like HOST:PORT")


def require_mooncake() -> None:
    """Raises TierOpenError if Mooncake is not installed. Only the process imports it."""
    if importlib.util.find_spec("mooncake") is None:
        raise TierOpenError("needs the package mooncake-transfer-engine-non-cuda: pip install 'kvtier[mooncake]'")


class MooncakeProcess:
    """The process, restarted when a call needs it. Thread-safe.

    A process that has been killed cannot touch the region any more: `kill` returns after its end.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        self.region: Region | None = None
        """Set before the first call."""
        self._changed = threading.Condition()
        self._child: MooncakeChild | None = None
        self._is_closed = False
        self._why = "the client process has not started yet"
        self.suspects = AvoidedNames(SUSPECT_SECONDS)
        """Values that could not be loaded, although the master reports them present."""

    def start(self) -> None:
        """Starts the process on a thread, unless one runs."""
        with self._changed:
            if self._child is None and not self._is_closed:
                self._why = "the client process is starting"
                child = MooncakeChild(self._settings, self.region, self._on_change)
                try:
                    child.thread.start()
                except RuntimeError as error:  # no thread available; the next call tries again
                    self._why = f"the client process cannot start: {error}"
                else:
                    self._child = child

    def connect(self, ends_at: float) -> tuple[MooncakeChild, socket.socket]:
        """Returns the process and a connection to it, of one thread. Starts a process if necessary.

        Raises StoreUnavailableError if no process is ready at a time on the monotonic clock. Its
        start then continues.
        """
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: self._child is None or self._child.is_ready, ends_at - time.monotonic())
            child = self._child
            if child is None or not child.is_ready:
                raise StoreUnavailableError(self._why)
        return child, child.connect()

    def is_running(self, child: MooncakeChild) -> bool:
        return self._child is child

    def kill(self, child: MooncakeChild) -> None:
        """Kills a process and waits for its end. May be repeated."""
        child.kill()
        with self._changed:
            self._changed.wait_for(lambda: self._child is not child)

    def abandon(self, child: MooncakeChild) -> None:
        """Leaves a call behind that moves no bytes. Kills the process if it has left many."""
        child.late_calls += 1
        if child.late_calls >= LATE_CALLS:
            self.kill(child)

    def close(self) -> None:
        """Ends the process; later calls fail."""
        with self._changed:
            self._is_closed = True
            child = self._child
        if child is not None:
            self.kill(child)
            child.thread.join()

    def _on_change(self, child: MooncakeChild, ended: str | None) -> None:
        """Called on the thread of a process when it is ready, or has ended for a reason."""
        with self._changed:
            if ended is not None and self._child is child:
                self._child = None
                self._why = ended
            self._changed.notify_all()


class MooncakeChild:
    """One process, and the thread that starts it and waits for its end."""

    def __init__(
        self,
        settings: MooncakeSettings,
        region: Region | None,
        on_change: Callable[[MooncakeChild, str | None], None],
    ) -> None:
        """Calls `on_change` on `thread`: with None when ready, with the reason after the end."""
        self.is_ready = False
        self.late_calls = 0
        self.thread = threading.Thread(target=self._run, name="kvtier-mooncake-process", daemon=True)
        self._settings = settings
        self._region = region
        self._on_change = on_change
        self._process: subprocess.Popen[bytes] | None = None
        self._control, self._theirs = socket.socketpair()
        self._is_killed = False
        self._killing = threading.Lock()

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise StoreUnavailableError("the client process has ended") from error
        return ours

    def kill(self) -> None:
        with self._killing:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()

    def _run(self) -> None:
        try:
            why = self._run_process()
        except StoreUnavailableError as error:
            why = f"{error}"
        except OSError as error:
            why = f"cannot start the client process: {error}"
        self._control.close()
        self._theirs.close()
        self._on_change(self, why)

    def _run_process(self) -> str:
        """Runs the process until its end; returns the reason of the end."""
        local_host = self._reach_master()
        with self._killing:
            if self._is_killed:
                return "the client process was ended"
            self._process = self._popen(local_host)
        self._theirs.close()
        try:
            message = self._first_message()
            self.is_ready = message == READY
            if self.is_ready:
                self._on_change(self, None)
                self._process.wait()
                return self._reason(self._process.returncode)
            return message.decode(errors="replace") or "the client process has ended during its start"
        finally:
            self._process.kill()
            self._process.wait()

    def _reason(self, status: int) -> str:
        if self._is_killed:
            return "the client process was ended, because a call did not end"
        return f"the client process has ended (status {status})"

    def _reach_master(self) -> str:
        """Returns the address that the master sees. Mooncake would try to connect for 90 s."""
        try:
            with socket.create_connection(master_address(self._settings.master), REACH_SECONDS) as connection:
                return self._settings.local_host or str(connection.getsockname()[0])
        except OSError as error:
            raise StoreUnavailableError(f"the master does not answer: {error}") from error

    def _first_message(self) -> bytes:
        gib = (self._region.size_bytes >> 30) if self._region else 0
        self._control.settimeout(START_SECONDS + gib)
        try:
            return self._control.recv(1000)
        except TimeoutError:
            return b"the client process did not start in time"
        finally:
            self._control.settimeout(None)

    def _popen(self, local_host: str) -> subprocess.Popen[bytes]:
        settings, region, theirs = self._settings, self._region, self._theirs.fileno()
        pools = region.pools if region is not None else ()
        options = {name: getattr(settings, name) for name in ("master", "metadata", "protocol")}
        options |= {"device": settings.device or "", "local_host": local_host}
        arguments = [str(theirs), json.dumps(pools), json.dumps(options)]
        fds = [theirs, *(fd for _, _, fd in pools)]
        with contextlib.ExitStack() as files:
            log = files.enter_context(settings.log.open("ab")) if settings.log is not None else subprocess.DEVNULL
            return start_module(_MODULE, arguments, fds, stdout=log, stderr=log)
