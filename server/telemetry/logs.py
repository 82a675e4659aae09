"""Structured logs on standard error, which never hold up whoever writes them.

Everything goes one way: structlog and the standard library's `logging` (grpc's included) meet in one queue; a thread
renders and writes. A reader of our standard error that stalls costs lines, not latency: when the queue is full, lines
are dropped and counted.
"""

from __future__ import annotations

import atexit
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
from structlog.typing import EventDict

from ..config.schema import LogConfig

__all__ = ["configure", "flush", "get_logger"]

_QUEUE_LINES = 8192
_FLUSH_SECONDS = 2.0
_CHATTY = ("asyncio", "grpc")

Logger = structlog.typing.FilteringBoundLogger


def get_logger(name: str) -> Logger:
    """Makes the logger of a module, to be used like `log.info("what happened", tier="lmdb")`.

    May be called before `configure`, at import for one; every thread may use it.
    """
    return cast("Logger", structlog.get_logger(name))


def configure(config: LogConfig, stream: TextIO | None = None) -> None:
    """Sets up logging for the process; a second call replaces the first. Call it before grpc is imported.

    `stream` is for tests. Also sends warnings and uncaught exceptions of all threads to the log.
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
    """Writes what is queued, for at most two seconds. Lines logged later go out as well, until the process ends."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _QueueHandler):
            handler.drain()


class _QueueHandler(logging.Handler):
    """Hands records to a thread of its own, and drops them when that cannot keep up."""

    def __init__(self, formatter: logging.Formatter, write: Callable[[str], object]) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._write = write
        self._queue: queue.Queue[logging.LogRecord | threading.Event] = queue.Queue(_QUEUE_LINES)
        self._dropped = 0
        # A daemon: a stalled reader must not keep the process from ending.
        threading.Thread(target=self._run, name="kvtier-log", daemon=True).start()
        atexit.register(self.drain)

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record; never blocks."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def drain(self) -> None:
        """Waits until what was queued so far is written, or two seconds."""
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
            except Exception:  # noqa: BLE001 - there is nowhere left to say it
                self._dropped += 1
                continue
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                self._write(f"{self.format(_dropped_record(dropped))}\n")


def _dropped_record(lines: int) -> logging.LogRecord:
    """Makes what structlog would make of it; through the queue it might be dropped itself."""
    event = {"event": "log lines dropped", "lines": lines}
    record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, event, None, None)
    record.__dict__.update(_logger=None, _name="warning")
    return record


def _writer_to(stream: TextIO) -> Callable[[str], object]:
    """Returns what writes text to a stream; past its buffer where it is a file.

    A thread that is stuck within the buffer holds its lock, and Python would wait for that at the end of the process.
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
        plain = structlog.dev.plain_traceback
        renderer = [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain, pad_event_to=32)]
    else:
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return structlog.stdlib.ProcessorFormatter(
        processors=[_from_record, structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
    )


def _catch_exception(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Takes hold of the current exception: the thread that renders has another."""
    if event.get("exc_info") is True:
        event["exc_info"] = sys.exc_info()
    return event


def _from_record(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Adds when, how severe and where from; in this order, before what."""
    record: logging.LogRecord = event["_record"]
    when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {"timestamp": when, "level": record.levelname.lower(), "logger": record.name, "event": "", **event}


def _silence_grpc_core(config: LogConfig) -> None:
    # The C core writes straight to standard error, in a format of its own; what matters comes as an exception too.
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
