"""The log: one destination for all messages, and callers never wait for it."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import pytest

from kvtier.server.config.schema import LogConfig
from kvtier.server.telemetry import line_limit, logs

pytestmark = pytest.mark.usefixtures("restored_logs")


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    logs.flush()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_are_json() -> None:
    """Off a terminal each line is one JSON object with time, level, logger, event and fields."""
    stream = io.StringIO()
    logs.configure(LogConfig(), stream)
    logs.get_logger("kvtier.x").info("tier opened", tier="lmdb", path=object)
    [line] = lines_of(stream)
    assert list(line) == ["timestamp", "level", "logger", "event", "tier", "path"]
    assert line["timestamp"].endswith("Z")
    assert (line["level"], line["logger"], line["event"], line["tier"]) == ("info", "kvtier.x", "tier opened", "lmdb")


def test_lines_are_text_on_a_terminal() -> None:
    stream = io.StringIO()
    logs.configure(LogConfig(format="console"), stream)
    logs.get_logger("kvtier.x").warning("tier full", tier="lmdb")
    logs.flush()
    assert "[warning  ] tier full" in stream.getvalue()
    assert "tier=lmdb" in stream.getvalue()


def test_other_loggers_and_warnings_share_the_log() -> None:
    """Loggers of the standard library, as gRPC and tiers use, end in the same log."""
    stream = io.StringIO()
    logs.configure(LogConfig(), stream)
    logging.getLogger("grpc._server").error("bad %s", "frame")
    logging.getLogger("grpc._server").info("chatter")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    first, second = lines_of(stream)
    assert (first["logger"], first["event"]) == ("grpc._server", "bad frame")
    assert second["logger"] == "py.warnings"


def test_lines_below_the_level_are_dropped() -> None:
    """The level applies to every logger; a second set-up replaces the first."""
    stream = io.StringIO()
    log = logs.get_logger("kvtier.x")
    logs.configure(LogConfig(level="debug"), stream)
    logs.configure(LogConfig(level="error"), stream)
    log.warning("no")
    logging.getLogger("kvtier.y").warning("no")
    log.error("yes")
    assert [line["event"] for line in lines_of(stream)] == ["yes"]


def test_tracebacks_are_part_of_the_line() -> None:
    """Also if the exception has ended before the line is written."""
    stream = io.StringIO()
    logs.configure(LogConfig(), stream)
    try:
        {}["block"]
    except KeyError as error:
        logs.get_logger("kvtier.x").exception("failed")
        caught = error
    logs.get_logger("kvtier.x").error("failed before", exc_info=caught)
    for line in lines_of(stream):
        assert line["exception"].startswith("Traceback")
        assert "KeyError: 'block'" in line["exception"]


def test_uncaught_exceptions_are_logged() -> None:
    """On any thread."""
    stream = io.StringIO()
    logs.configure(LogConfig(), stream)
    thread = threading.Thread(target=lambda: 1 // 0, name="mill")
    thread.start()
    thread.join()
    sys.excepthook(ValueError, ValueError("x"), None)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    first, second = lines_of(stream)
    assert first["event"] == "uncaught exception in thread mill"
    assert "ZeroDivisionError" in first["exception"]
    assert (second["level"], second["event"]) == ("critical", "uncaught exception")


class _Stalled(io.StringIO):
    """A reader that reads nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.go.wait(60)
        return super().write(text)


def test_a_stalled_reader_drops_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers do not wait; the number of lost lines follows when the reader continues."""
    monkeypatch.setattr("kvtier.server.telemetry.line_limit._LINES", 1 << 20)
    stream = _Stalled()
    logs.configure(LogConfig(), stream)
    log = logs.get_logger("kvtier.x")
    started = time.monotonic()
    for number in range(12_000):
        log.info("line", number=number)
    assert time.monotonic() - started < 30
    stream.go.set()
    lines = lines_of(stream)
    dropped = sum(line["lines"] for line in lines if line["event"] == "log lines dropped")
    written = sum(line["event"] == "line" for line in lines)
    assert dropped > 3000
    assert written + dropped == 12_000


def test_lines_before_the_exit_are_written() -> None:
    """Including an uncaught exception."""
    code = (
        "from kvtier.server.telemetry import logs; from kvtier.server.config.schema import LogConfig\n"
        "logs.configure(LogConfig()); log = logs.get_logger('x')\n"
        "for number in range(500): log.info(f'line {number}')\n"
        "raise ValueError('end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert len(lines) == 501
    assert "ValueError: end" in lines[-1]["exception"]


def test_an_unread_pipe_does_not_block_the_process() -> None:
    """The process continues, and ends."""
    code = (
        "from kvtier.server.telemetry import logs; from kvtier.server.config.schema import LogConfig\n"
        "from kvtier.server.telemetry import line_limit; line_limit._MAX_KINDS = 1 << 20\n"
        "logs.configure(LogConfig()); log = logs.get_logger('x')\n"
        "for number in range(20000): log.info(f'{number} ' + 'x' * 100)\n"
        "print('done', flush=True)"
    )
    reading, writing = os.pipe()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writing, text=True) as process:
        os.close(writing)
        assert process.stdout.read() == "done\n"
        assert process.wait(60) == 0
    os.close(reading)


def test_lines_for_people_have_escapes_for_control_characters() -> None:
    """Fields, messages of other loggers, and messages of exceptions can quote a client's name."""
    name = "a\x1b[2J\x9b\u202e\u2028\u200b"
    stream = io.StringIO()
    logs.configure(LogConfig(format="console"), stream)
    logs.get_logger("kvtier.x").info("session opened", client=name, engine=f"the {name}")
    logging.getLogger("x").error("refused\r\n%s", name)
    logs.get_logger("kvtier.x").error("call failed", exc_info=ValueError(f"no {name}"))
    logs.flush()

    shown = stream.getvalue()
    assert all(character.isprintable() or character == "\n" for character in shown), ascii(shown)
    assert r"client=a\x1b[2J\x9b\u202e\u2028\u200b" in shown
    assert r"ValueError: no a\x1b[2J\x9b\u202e\u2028\u200b" in shown


def test_json_lines_have_the_exact_names() -> None:
    name = "a\x1b[2J\x9b\u202e\u2028\u200b"
    stream = io.StringIO()
    logs.configure(LogConfig(), stream)
    logs.get_logger("kvtier.x").info("session opened", client=name)

    [line] = lines_of(stream)
    assert line["client"] == name
    assert stream.getvalue().isascii()


@pytest.mark.parametrize("plain", [False, True])
def test_equal_lines_have_a_limit(monkeypatch: pytest.MonkeyPatch, *, plain: bool) -> None:
    """A peer that repeats a failure writes few lines. The next line counts the others."""
    now = [5.0]
    monkeypatch.setattr(line_limit.LineLimit.__init__, "__defaults__", (lambda: now[0],))
    stream = io.StringIO()
    logs.configure(LogConfig(), stream)
    for number in range(10_000):
        if plain:
            logging.getLogger("kvtier.y").warning("cannot serve a connection: %s", number)
        else:
            logs.get_logger("kvtier.y").warning("attach refused", error=f"{number}")
    logs.get_logger("kvtier.y").warning("another event")
    assert len(lines_of(stream)) == line_limit._LINES + 1
    now[0] += 2 * line_limit._SECONDS
    if plain:
        logging.getLogger("kvtier.y").warning("cannot serve a connection: %s", "last")
    else:
        logs.get_logger("kvtier.y").warning("attach refused", error="last")
    last = lines_of(stream)[-1]
    left_out = 10_000 - line_limit._LINES
    assert (f"({left_out} such lines were left out)" in last["event"]) if plain else last["left_out"] == left_out


def test_lines_of_many_kinds_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer with many addresses gets no line for each of them, and takes bounded memory."""
    monkeypatch.setattr(line_limit, "_MAX_KINDS", 4)
    now = [5.0]
    limit = line_limit.LineLimit(1, 10.0, lambda: now[0])
    assert sum(limit.admit(f"address {number}") is not None for number in range(1000)) == 5
    now[0] += 10
    assert limit.admit("address 2000") is not None
    assert len(limit._kinds) <= 5


def test_lines_of_a_child_process_have_a_limit() -> None:
    """The processes for streams, events and devices write them to standard error."""
    code = (
        "import logging, socket; from kvtier.server.process.child_main import connect\n"
        "mine, other = socket.socketpair(); connect(mine.detach()); log = logging.getLogger('kvtier.z')\n"
        "for number in range(10_000): log.warning('cannot accept a connection: %s', number)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert 0 < len(done.stderr.splitlines()) <= line_limit._LINES + 60
