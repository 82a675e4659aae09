"""The processes of a demo: kvtier servers, engines and other programs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn, Self

from rich.console import Console
from rich.status import Status

__all__ = [
    "BLOCK_TOKENS",
    "KVTIER",
    "Child",
    "DemoError",
    "Engine",
    "Result",
    "Server",
    "console",
    "free_ports",
    "new_job",
    "progress",
    "run_demo",
]

HERE = Path(__file__).resolve().parent
KVTIER = Path(sys.executable).with_name("kvtier")
BLOCK_TOKENS = 64
NEW_TOKENS = 24
LOOKUP_SECONDS = 20.0
"""Longest wait for blocks of lower tiers: other processes may need the cores meanwhile."""
PATIENCE_SECONDS = 60.0

console = Console(highlight=False)


class DemoError(Exception):
    """The demo cannot continue; the message says why."""


@dataclass(frozen=True)
class Result:
    """Result of one engine process."""

    computed: int
    """Tokens of the prompt that the engine computed."""
    loaded: dict[str, int]
    """Tokens of the prompt that the engine loaded, by tier."""
    first_token_seconds: float
    output: list[int]


class Child:
    """A process that ends when its `with` block ends. Its log is a file."""

    end_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        piped: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._piped = piped
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.send_signal(self.end_signal)
        try:
            self._process.wait(PATIENCE_SECONDS)
        finally:  # also after a timeout or a second Ctrl-C
            self.kill()

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None, "not started"
        return self._process

    def start(self) -> None:
        """Starts the process. May be repeated after `kill`."""
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self._piped else log,
                stderr=log,
                text=True,
                cwd=self.log.parent,
                env=self._environment,
            )

    def kill(self) -> None:
        """Ends the process as a crash would. May be repeated."""
        self.process.kill()
        self.process.wait()

    def wait_until(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits until `condition()` is true; `what` describes it for the error."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise DemoError(f"{self.name} has ended with {self.process.returncode}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise DemoError(f"{self.name}: {what} takes more than {seconds:.0f} s")
            time.sleep(0.1)

    def last_words(self, limit: int = 300) -> str:
        """Returns the last characters of the log."""
        return self.log.read_text(errors="replace").strip()[-limit:] or "its log is empty"


class Server(Child):
    """A `kvtier serve` in its own directory, with the embedded defaults and `options`."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        name: str = "the server",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.endpoint = f"unix:{directory / 'kvtier.sock'}"
        command = [KVTIER, "serve", "--listen", self.endpoint, "--data-dir", str(directory / "data"), *options]
        super().__init__(name, command, directory / "server.log", environment)

    def start(self) -> None:
        """Starts the server and waits for its first answer."""
        super().start()
        self.wait_until(lambda: self.status() is not None, "the start")

    def status(self) -> dict[str, Any] | None:
        """Returns the answer of `kvtier status`, or None without a server."""
        command = [KVTIER, "status", "--endpoint", self.endpoint, "--json"]
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        return json.loads(answer.stdout) if answer.returncode == 0 else None

    def settle(self) -> int:
        """Waits until the CPU tier's blocks are all in each tier below. Returns their number."""
        counts: set[int] = set()

        def settled() -> bool:
            status = self.status()
            if status is None:
                return False
            counts.clear()
            counts.update(tier["blocks"] for tier in status["tiers"])
            return not status["stores"] and not any(tier["jobs"] for tier in status["tiers"]) and len(counts) == 1

        self.wait_until(settled, "the write-back to the tiers")
        return counts.pop()


class Keeper(Child):
    """A `kvtier keeper`, which holds the memory of the CPU tier while the server restarts."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "keeper.sock"
        super().__init__("the keeper", [KVTIER, "keeper", "--socket", self.path], directory / "keeper.log")

    def start(self) -> None:
        """Starts the keeper and waits for its socket."""
        self.path.unlink(missing_ok=True)
        super().start()
        self.wait_until(self.path.exists, "the start")


class Engine(Child):
    """One engine process. With `stays` it waits after its result until it is killed."""

    def __init__(self, kind: str, directory: Path, job: Mapping[str, Any], label: str, *, stays: bool = False) -> None:
        job_file = directory / "job.json"
        job_file.write_text(json.dumps({**job, "stays": stays}))
        command = [sys.executable, HERE / f"engine_{kind}.py", job_file]
        super().__init__(label, command, directory / "engine.log", piped=True)
        self._stays = stays

    def result(self) -> Result:
        """Shows the progress of the engine until it has its result."""
        output = self.process.stdout
        assert output is not None
        result = None
        with progress(f"{self.name}: starts") as status:
            for line in output:
                if not line.startswith('{"event"'):  # the engine's own output
                    continue
                message = json.loads(line)
                event = message.pop("event")
                status.update(f"{self.name}: {event}")
                if event == "done":
                    result = Result(**message)
                    if self._stays:
                        return result
            code = self.process.wait()
        if code != 0 or result is None:
            raise DemoError(f"{self.name} ended with {code}:\n{self.last_words(4000)}")
        return result


def progress(text: str) -> Status:
    """Returns a spinner line."""
    if not console.is_terminal:
        console.print(f"… {text}", markup=False)
    return console.status(text)


def free_ports(address: str, count: int) -> list[int]:
    """Returns ports of an address of this machine that no process uses."""
    sockets = []
    try:
        for _ in range(count):
            sockets.append(socket.socket())
            sockets[-1].bind((address, 0))
        return [each.getsockname()[1] for each in sockets]
    except OSError as error:
        raise DemoError(f"no free port on {address}: {error.strerror}") from None
    finally:
        for each in sockets:
            each.close()


def new_job(directory: Path, prompt_tokens: int) -> dict[str, Any]:
    """Makes the model. Returns what all engine processes must know: all but the endpoint."""
    from model import make_model, make_prompt

    with progress("makes a small Llama with seeded random weights (47 million parameters, nothing is downloaded)"):
        make_model(directory / "model")
    return {
        "model": str(directory / "model"),
        "prompt": make_prompt(prompt_tokens),
        "new_tokens": NEW_TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "wait_seconds": LOOKUP_SECONDS,
    }


def run_demo(demo: Callable[[Path], int], plain_width: int = 110) -> int:
    """Runs a demo in a temporary directory; returns the exit code.

    SIGTERM and SIGHUP end a demo like Ctrl-C, so that its processes end, too.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    if not console.is_terminal:
        console.width = plain_width
    try:
        with tempfile.TemporaryDirectory(prefix="kvtier-demo-", ignore_cleanup_errors=True) as directory:
            return demo(Path(directory))
    except DemoError as error:
        console.print(f"failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt as interrupt:
        console.print(
            f"interrupted{f' by {interrupt}' if str(interrupt) else ''}; all processes of the demo have ended"
        )
        return 130


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)
