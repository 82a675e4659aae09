"""A command with a screen in a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Self

import pyte

__all__ = ["SHELL", "Terminal"]

_SECONDS = 60

SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
command = os.fork()
if not command:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    os.execvp(sys.argv[1], sys.argv[1:])
while True:
    _, status = os.waitpid(command, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    if not os.WIFSTOPPED(status):
        sys.exit(os.waitstatus_to_exitcode(status))
    print("the job is suspended", flush=True)
    sys.stdin.readline()
    os.tcsetpgrp(0, command)
    os.killpg(command, signal.SIGCONT)
"""
"""Shell with one job: runs a command, and continues it after a line. The kernel stops only jobs
whose parent is in another process group of the session."""


class Terminal:
    """`kvtier top` or `kvtier fleet top` in a pseudo-terminal, and the screen that a user sees."""

    def __init__(
        self,
        *command: str,
        columns: int = 80,
        lines: int = 24,
        shell: str = "",
        interval: str = "0.3",
        **environment: str,
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self.raw = b""
        self._stream = pyte.ByteStream(self.screen)
        self._leader, follower = pty.openpty()
        self._readable = select.poll()  # `select` refuses descriptors above 1,023
        self._readable.register(self._leader, select.POLLIN)
        self.resize(columns, lines)
        self.attributes = termios.tcgetattr(self._leader)
        kept = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        # With a controlling terminal, Ctrl-C is a signal.
        start = ["setsid", "--ctty", "env", "--default-signal=INT", sys.executable]
        start += ["-c", shell, sys.executable] if shell else []
        self.process = subprocess.Popen(
            [*start, "-m", "kvtier.server", *command, "--interval", interval],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=kept | {"TERM": "xterm-256color"} | environment,
        )
        os.close(follower)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._leader)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def rows(self) -> list[str]:
        """Returns the lines of the table, without its header."""
        lines = [line.rstrip() for line in self.screen.display]
        first = next(number for number, line in enumerate(lines) if "▲" in line or "▼" in line) + 1
        last = next(number for number, line in enumerate(lines) if line.startswith("rows "))
        return lines[first:last]

    def press(self, key: str, shows: Callable[[str], object]) -> None:
        """Presses a key and waits until the screen shows its effect."""
        os.write(self._leader, key.encode())
        self.wait(shows)

    def wait(self, shows: Callable[[str], object]) -> None:
        deadline = time.monotonic() + _SECONDS
        while not self._shows(shows):
            assert time.monotonic() < deadline, self.text
            assert self._read() or self.process.poll() is None, self.text

    def wait_end(self) -> int:
        deadline = time.monotonic() + _SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def is_restored(self) -> bool:
        """Returns whether the terminal is as it was before the command."""
        return termios.tcgetattr(self._leader) == self.attributes and self.raw.rfind(b"\x1b[?1049l") > self.raw.rfind(
            b"\x1b[?1049h"
        )

    def _shows(self, shows: Callable[[str], object]) -> bool:
        with contextlib.suppress(StopIteration):  # the table is not complete
            return bool(shows(self.text))
        return False

    def _read(self) -> bool:
        data = b""
        with contextlib.suppress(OSError):
            if self._readable.poll(50):
                data = os.read(self._leader, 1 << 16)
        self.raw += data
        self._stream.feed(data)
        return bool(data)
