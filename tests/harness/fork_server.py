"""Fork server: starts `kvtier` commands in copies of one process that has imported everything.

An interpreter needs about a second of processor time for the imports of a server. A fork needs some
milliseconds. The fork server itself has no thread and no object of gRPC. Each process of pytest has
one fork server.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ForkedProcess", "fork_command", "run_command"]

_MAX_REQUEST_BYTES = 1 << 17
_PR_SET_PDEATHSIG = 1


class ForkedProcess:
    """A process like `subprocess.Popen`, which the fork server has started and reaps."""

    def __init__(self, status: int) -> None:
        """`status`: a pipe that delivers the pid, and later the exit code."""
        self.returncode: int | None = None
        self._status = status
        self.pid = self._read_number()

    def poll(self) -> int | None:
        return self._take(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._take(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("kvtier", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _take(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            if poll.poll(None if timeout is None else timeout * 1000):
                self.returncode = self._read_number()
                os.close(self._status)
        return self.returncode

    def _read_number(self) -> int:
        text = b""
        while not text.endswith(b"\n"):
            byte = os.read(self._status, 1)
            assert byte, "the fork server has ended"
            text += byte
        return int(text)


def fork_command(
    arguments: Sequence[str], *, environment: Mapping[str, str], stdin: int, stdout: int, stderr: int
) -> ForkedProcess:
    """Runs `kvtier ARGUMENTS` in a fork with these descriptors."""
    read, write = os.pipe()
    request = json.dumps([list(arguments), dict(environment), str(Path.cwd())]).encode()
    try:
        socket.send_fds(_requests, [request], [stdin, stdout, stderr, write])
    finally:
        os.close(write)
    return ForkedProcess(read)


def run_command(
    arguments: Sequence[str], *, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Runs `kvtier ARGUMENTS` in a fork until it ends."""
    with contextlib.ExitStack() as files:
        null = files.enter_context(open(os.devnull))  # noqa: PTH123
        out, err = (files.enter_context(open(_memory_file(), "w+")) for _ in range(2))
        process = fork_command(
            arguments, environment=environment, stdin=null.fileno(), stdout=out.fileno(), stderr=err.fileno()
        )
        try:
            code = process.wait(timeout)
        except BaseException:
            process.kill()
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess(["kvtier", *arguments], code, *texts)


def _memory_file() -> int:
    return os.memfd_create("output")


def _start() -> socket.socket:
    """Starts the fork server of this process; it ends with the returned socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


if __name__ != "__main__":
    # At import, because a test must not leave descriptors that it has opened.
    _requests = _start()


class _Forks:
    """The fork server's loop: forks for each request, and reports the end of each fork."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._statuses: dict[int, int] = {}
        self._wakeup = os.pipe()
        for end in self._wakeup:
            os.set_blocking(end, False)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self._requests, self._wakeup[0]], [], [])
            if self._wakeup[0] in ready:
                os.read(self._wakeup[0], 4096)
                self._reap()
            if self._requests in ready:
                request, descriptors, _, _ = socket.recv_fds(self._requests, _MAX_REQUEST_BYTES, 4)
                if not request:
                    return
                self._fork(json.loads(request), descriptors)

    def _fork(self, request: list[Any], descriptors: list[int]) -> None:
        *standard, status = descriptors
        pid = os.fork()
        if not pid:
            os.close(status)
            # A background job ignores these.
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            self._become(request, standard)
        for descriptor in standard:
            os.close(descriptor)
        os.write(status, b"%d\n" % pid)
        self._statuses[pid] = status

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                pipe = self._statuses.pop(pid)
                with contextlib.suppress(BrokenPipeError):  # the test has ended
                    os.write(pipe, b"%d\n" % os.waitstatus_to_exitcode(status))
                os.close(pipe)

    def _become(self, request: list[Any], standard: list[int]) -> None:
        """Runs the command in the fork; does not return."""
        code = 1
        try:
            arguments, environment, directory = request
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            os.closerange(3, 1024)
            os.chdir(directory)
            os.environ.clear()
            os.environ.update(environment)
            self._start_as_interpreter(environment.get("PYTHONPATH", ""))
            code = _run(arguments)
        except BaseException:  # noqa: BLE001 - a fork must not return to the loop
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(code)

    @staticmethod
    def _start_as_interpreter(path: str) -> None:
        """Does what an interpreter does with PYTHONPATH."""
        if path:
            sys.path[:0] = path.split(os.pathsep)
            sys.modules.pop("sitecustomize", None)
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module("sitecustomize")


def _run(arguments: list[str]) -> int:
    """Runs a command as an interpreter does, with what happens at its end; returns the code."""
    from kvtier.server.cli import main

    sys.argv = ["kvtier", *arguments]
    try:
        code = main(arguments)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code or 0


def _import_all() -> None:
    """Imports what a server and each command need."""
    import pkgutil

    import kvtier.server
    import kvtier.tiers

    for package in (kvtier.server, kvtier.tiers):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(("__main__", ".main")):
                importlib.import_module(module.name)
    import grpc.aio  # noqa: F401


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, which closes the socket
    os.environ["GRPC_VERBOSITY"] = "NONE"  # read by the import; a server sets it before that
    _import_all()
    gc.collect()
    gc.freeze()
    _Forks(socket.socket(fileno=int(sys.argv[1]))).run()
