"""A process that uses a store of descriptors as a server does, and the stores that it can use."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["WAIT_SECONDS", "FakeSystemd", "RunningKeeper", "StoreServer", "contents"]

_AS_INHERITED = """
import fcntl, os, sys
count = int(sys.argv[1])
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 100 + count) for fd in sys.argv[2 : 2 + count]]
for number, fd in enumerate(high, 3):
    os.dup2(fd, number)
for fd in {*high, *map(int, sys.argv[2 : 2 + count])} - set(range(3, 3 + count)):
    os.close(fd)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, *sys.argv[2 + count :]])
"""
"""Gives the descriptors the numbers from 3 on, as systemd does, and becomes a server."""

WAIT_SECONDS = 60.0


class StoreServer:
    """A process that executes one call of a store after the other."""

    def __init__(self, environment: Mapping[str, str], inherited: Sequence[int] = ()) -> None:
        command = [sys.executable, __file__]
        if inherited:
            numbers = [str(descriptor) for descriptor in inherited]
            command = [sys.executable, "-I", "-S", "-c", _AS_INHERITED, str(len(numbers)), *numbers, __file__]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
            pass_fds=list(inherited),
        )
        self.pid = self._process.pid

    def begin(self, call: str, *arguments: object) -> None:
        """Sends a call without waiting for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([call, *arguments]).encode() + b"\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """Waits for the end of a call; returns its value, or the text of its error."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the server ended with {self._process.wait(WAIT_SECONDS)}"
        return json.loads(line)

    def call(self, call: str, *arguments: object) -> Any:
        self.begin(call, *arguments)
        return self.result()

    def kill(self) -> None:
        """Ends the process as a crash does. Idempotent."""
        self._process.kill()
        self._process.wait(WAIT_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class RunningKeeper:
    """A `kvtier keeper`, from `__enter__` to `__exit__`."""

    def __init__(self, directory: Path, *flags: str, stderr: int | None = None, prefix: Sequence[str] = ()) -> None:
        self.path = directory / "keeper"
        self._log = directory / "keeper.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "kvtier.server", "keeper", "--socket", str(self.path), *flags],
                stdin=subprocess.DEVNULL,
                stderr=log if stderr is None else stderr,
                # A background job of a shell, as the tests may be, ignores SIGINT.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads fork here
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def descriptors(self) -> int:
        """Number of open descriptors of the process."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208

    def start(self) -> StoreServer:
        """Starts a server whose store is this keeper."""
        server = StoreServer({})
        server.begin("open", str(self.path))
        assert server.result() == "KeeperStore"
        return server

    def wait_ready(self) -> Self:
        """Waits until servers can connect."""
        while True:
            assert self.process.poll() is None, self.log
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                try:
                    probe.connect(str(self.path))
                except (FileNotFoundError, ConnectionRefusedError):
                    select.select([], [], [], 0.01)
                    continue
                probe.send(b"no hello")
                while probe.recv(100):  # until the keeper has closed the connection
                    pass
                return self

    def __enter__(self) -> Self:
        try:
            return self.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(WAIT_SECONDS)


class FakeSystemd:
    """The store of systemd in this process: one unit with FileDescriptorStoreMax=`limit`."""

    def __init__(self, directory: Path, limit: int = 4096) -> None:
        self.messages: list[str] = []
        """Messages of servers, in their order."""
        self._path = str(directory / "notify")
        self._limit = limit
        self._kept: list[tuple[str, int, bool]] = []
        """Name, descriptor and whether it is dropped when it hangs up."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._path)
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def start(self, **environment: str) -> StoreServer:
        """Starts a server that inherits what the store has. `environment` overrides variables."""
        self.settle()
        variables = {"NOTIFY_SOCKET": self._path, "FDSTORE": str(self._limit)}
        if self._kept:
            names = ":".join(name for name, _, _ in self._kept)
            variables |= {"LISTEN_FDS": str(len(self._kept)), "LISTEN_FDNAMES": names}
        server = StoreServer(variables | environment, [descriptor for _, descriptor, _ in self._kept])
        server.begin("open", None)
        assert server.result() == "SystemdStore"
        return server

    def settle(self) -> None:
        """Waits until all messages that were sent before are handled."""
        self._settled.clear()
        self._tell("SETTLE=1")
        assert self._settled.wait(WAIT_SECONDS)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell("END=1")
        self._thread.join()
        self._socket.close()
        self._drop(lambda _: True)

    def _tell(self, message: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(message.encode(), self._path)

    def _serve(self) -> None:
        while True:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            for _, descriptor, until_hangup in self._kept:
                if until_hangup:
                    poll.register(descriptor, 0)
            ready = {descriptor for descriptor, _ in poll.poll()}
            self._drop(lambda kept, ready=ready: kept[1] in ready)
            if self._socket.fileno() in ready and not self._take():
                return

    def _take(self) -> bool:
        """Handles one message; returns whether to continue."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 16)
        text = data.decode()
        fields = dict(line.split("=", 1) for line in text.split("\n"))
        if "SETTLE" in fields:
            self._settled.set()
        elif "FDSTORE" in fields:
            self.messages.append(text)
            self._kept += [(fields["FDNAME"], descriptor, "FDPOLL" not in fields) for descriptor in descriptors]
            for _, descriptor, _ in self._kept[self._limit :]:  # without a message to the server
                os.close(descriptor)
            del self._kept[self._limit :]
        elif "FDSTOREREMOVE" in fields:
            self.messages.append(text)
            self._drop(lambda kept: kept[0] == fields["FDNAME"])
        return "END" not in fields

    def _drop(self, is_dropped: Callable[[tuple[str, int, bool]], bool]) -> None:
        for kept in [kept for kept in self._kept if is_dropped(kept)]:
            self._kept.remove(kept)
            os.close(kept[1])


class _Calls:
    """The calls that a `StoreServer` executes, by name."""

    def __init__(self) -> None:
        self._peers: dict[str, int] = {}
        self._store: Any = None

    def open(self, keeper: str | None) -> str:
        from kvtier.server.process.descriptor_store import open_descriptor_store

        self._store = open_descriptor_store(Path(keeper) if keeper else None)
        return type(self._store).__name__

    def take(self) -> list[list[str]]:
        """Returns the name of each descriptor, and the content of memory or the type of file."""
        found = []
        for name, descriptor in self._store.take():
            assert not os.get_inheritable(descriptor)
            target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
            is_memory = target.startswith("/memfd:")
            found.append([name, os.pread(descriptor, 100, 0).decode() if is_memory else target.partition(":")[0]])
            os.close(descriptor)
        return sorted(found)

    def count(self) -> int:
        """Takes the descriptors; returns their number."""
        return len([os.close(descriptor) for _, descriptor in self._store.take()])

    def memory(self, name: str, text: str) -> None:
        descriptor = os.memfd_create("test")
        os.write(descriptor, text.encode())
        self._store.keep(name, descriptor)
        os.close(descriptor)

    def socket(self, name: str) -> None:
        """Keeps one end of a connection until the other one hangs up."""
        ours, theirs = socket.socketpair()
        self._store.keep(name, ours.fileno(), until_hangup=True)
        ours.close()
        self._peers[name] = theirs.detach()

    def hang_up(self, name: str) -> None:
        os.close(self._peers.pop(name))

    def ended_pipe(self, name: str) -> None:
        reader, writer = os.pipe()
        os.close(writer)
        self._store.keep(name, reader)
        os.close(reader)

    def many(self, name: str, most: int) -> list[object]:
        """Keeps up to `most` new files; returns how many the store has accepted, and the error."""
        accepted = 0
        try:
            for _ in range(most):
                self.memory(name, "")
                accepted += 1
        except OSError as error:
            return [accepted, type(error).__name__, error.errno]
        return [accepted]

    def forget(self, name: str) -> None:
        self._store.forget(name)

    def forget_all(self, name: str, count: int) -> float:
        """Forgets name-0, name-1 and so on without a pause; returns the longest time of a call."""
        longest = 0.0
        for number in range(count):
            began = time.monotonic()
            with contextlib.suppress(BlockingIOError):
                self._store.forget(f"{name}-{number}")
            longest = max(longest, time.monotonic() - began)
        return longest

    def close(self) -> None:
        self._store.close()

    def ask_for_list(self) -> None:
        """Requests the list and does not read it."""
        from kvtier.server.process.descriptor_messages import FDLIST, send

        connection = self._store._connection
        send(connection, FDLIST)
        select.select([connection], [], [])

    def fork(self) -> int:
        """Returns the process of a fork, which has the descriptors of the server."""
        pid = os.fork()
        if not pid:
            for number in (0, 1):
                os.close(number)
            signal.pause()
            os._exit(0)
        return pid


def _main() -> None:
    calls = _Calls()
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        try:
            result = getattr(calls, call)(*arguments)
        except Exception as error:  # noqa: BLE001 - a test compares it
            result = f"{type(error).__name__}: {error}"
        print(json.dumps(result), flush=True)


def contents(site: FakeSystemd | RunningKeeper) -> list[list[str]]:
    """Returns names and texts that the next server takes. No server may run."""
    with site.start() as server:
        found: list[list[str]] = server.call("take")
    return found


if __name__ == "__main__":
    _main()
