"""Structured logs on standard error that never block the caller.

structlog and the standard library's `logging` share one queue; a thread formats and writes the
lines. If the reader of standard error stalls and the queue is full, further lines are dropped. When
the reader continues, the thread writes how many lines were dropped. Lines with the same text are
limited (`LimitedLines`).
"""

from __future__ import annotations

import atexit
import io
import logging
import logging.handlers
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict, ExcInfo

from ..config.schema import LogConfig
from ..printable import printable
from .line_limit import LimitedLines

__all__ = ["Logger", "configure", "flush", "get_logger"]

_QUEUE_LINES = 8192
_FLUSH_SECONDS = 2.0
_CHATTY = ("asyncio", "grpc")

Logger = structlog.typing.FilteringBoundLogger


def get_logger(name: str) -> Logger:
    """Returns the logger of a module. Call it like `log.info("tier opened", tier="lmdb")`.

    May be called before `configure`, and from any thread.
    """
    return cast("Logger", structlog.get_logger(name))


def configure(config: LogConfig, stream: TextIO | None = None) -> None:
    """Sets up the logging of this process. Call it before grpc is imported.

    Warnings and uncaught exceptions of all threads are logged too. `stream` is for tests.
    """
    target: TextIO = sys.stderr if stream is None else stream
    _silence_grpc_core(config)
    level = getattr(logging, config.level.upper())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _catch_exception,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = _QueueHandler(_formatter(config, target), _writer_to(target))
    flush()
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def flush() -> None:
    """Waits until the queued lines are written, for at most two seconds."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _QueueHandler):
            handler.drain()


class _QueueHandler(logging.Handler):
    """Passes records to a writer thread, and drops them if the queue is full."""

    def __init__(self, formatter: logging.Formatter, write: Callable[[str], object]) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.addFilter(LimitedLines())
        self._write = write
        self._queue: queue.Queue[logging.LogRecord | threading.Event] = queue.Queue(_QUEUE_LINES)
        self._dropped = 0
        # A daemon, because a stalled reader must not keep the process alive.
        threading.Thread(target=self._run, name="kvtier-log", daemon=True).start()
        atexit.register(self.drain)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def drain(self) -> None:
        written = threading.Event()
        deadline = time.monotonic() + _FLUSH_SECONDS
        try:
            self._queue.put(written, timeout=_FLUSH_SECONDS)
        except queue.Full:
            return
        written.wait(deadline - time.monotonic())

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._write(f"{self.format(item)}\n")
            except Exception:  # noqa: BLE001 - an error in logging cannot be logged
                self._dropped += 1
                continue
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                self._write(f"{self.format(_dropped_record(dropped))}\n")


def _dropped_record(lines: int) -> logging.LogRecord:
    """Returns the log record about dropped lines. It bypasses the queue, which may be full."""
    event = {"event": "log lines dropped", "lines": lines}
    record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, event, None, None)
    record.__dict__.update(_logger=None, _name="warning")
    return record


def _writer_to(stream: TextIO) -> Callable[[str], object]:
    """Returns a function that writes text to a stream's descriptor, if the stream has one.

    Otherwise returns `stream.write`, which holds a lock. A thread that hangs in `stream.write`
    blocks the exit of the process, because the exit needs this lock.
    """
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError):
        return stream.write

    def write(text: str) -> None:
        data = memoryview(text.encode(errors="backslashreplace"))
        while data:
            data = data[os.write(descriptor, data) :]

    return write


def _formatter(config: LogConfig, stream: TextIO) -> logging.Formatter:
    console = config.format == "console" or (config.format == "auto" and stream.isatty())
    renderer: list[structlog.typing.Processor]
    if console:
        renderer = [
            _escape_fields,
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), exception_formatter=_write_traceback, pad_event_to=32
            ),
        ]
    else:
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return structlog.stdlib.ProcessorFormatter(
        processors=[_from_record, structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
    )


def _catch_exception(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Replaces `exc_info=True` by the current exception, which the writer thread cannot see."""
    if event.get("exc_info") is True:
        event["exc_info"] = sys.exc_info()
    return event


def _from_record(_logger: Any, _method: str, event: EventDict) -> EventDict:
    record: logging.LogRecord = event["_record"]
    when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {"timestamp": when, "level": record.levelname.lower(), "logger": record.name, "event": "", **event}


def _escape_fields(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Escapes control characters in the fields of a line of text. JSON has its own escapes."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def _write_traceback(stream: TextIO, exc_info: ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write("\n".join(map(printable, text.getvalue().split("\n"))))


def _silence_grpc_core(config: LogConfig) -> None:
    # gRPC's C core writes lines in another format to standard error. These lines are not needed,
    # because gRPC also raises the errors as exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "INFO" if config.level == "debug" else "NONE")


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    if issubclass(kind, KeyboardInterrupt):
        return
    logging.getLogger(__name__).critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> Any:
    if args.exc_value is not None:
        name = args.thread.name if args.thread else "?"
        exc_info = (args.exc_type, args.exc_value, args.exc_traceback)
        logging.getLogger(__name__).critical("uncaught exception in thread %s", name, exc_info=exc_info)
