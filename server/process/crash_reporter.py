"""Crash reporter: a child process that logs why a fatal signal ended the server.

A fatal signal, for example SIGBUS, ends the server before it can run another Python statement. In
the server, `faulthandler` writes the stacks of all threads into a pipe. The reporter reads the pipe
and logs what the signal means, and which directories it concerns. If the server ends in another
way, the pipe is empty and the reporter ends silently. A fork costs less memory and time than a new
interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ...tiers.storage.service_signals import without_signals
from ..telemetry import logs

__all__ = ["start_crash_reporter"]

_log = logs.get_logger(__name__)

_DUMP_BYTES = 1 << 20
_MAX_DESCRIPTORS = 1 << 20
_TRUNCATED = (
    "the server read a part of a file that is gone: the data.mdb of a tier was truncated while the server ran, "
    "or its disk cannot be read; the next start checks the files and reports how many blocks are lost"
)
_DEFECT = "a defect of the server or of one of its packages, or a damaged file of a tier; report it with these stacks"
_SIGNALS = {
    "Bus error": ("SIGBUS", _TRUNCATED),
    "Segmentation fault": ("SIGSEGV", _DEFECT),
    "Aborted": ("SIGABRT", _DEFECT),
    "Floating point exception": ("SIGFPE", _DEFECT),
    "Illegal instruction": ("SIGILL", _DEFECT),
}
"""Signal and reason per text of `faulthandler`."""


def start_crash_reporter(configure_logs: Callable[[], object], directories: Sequence[Path]) -> None:
    """Forks the reporter, which calls `configure_logs` before it logs. Raises `OSError`.

    `directories` are those of the tiers. Call this before the process starts its first thread.
    """
    reader, writer = os.pipe()
    try:
        # The reporter ends with the server, also after Ctrl-C in the server's terminal.
        with without_signals():
            pid = os.fork()
            if not pid:
                # A copy of a descriptor of systemd's store would hold its memory.
                os.closerange(3, reader)
                os.closerange(reader + 1, _MAX_DESCRIPTORS)
                _report(reader, configure_logs, directories)
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    os.close(reader)
    faulthandler.enable(writer)


def _report(reader: int, configure_logs: Callable[[], object], directories: Sequence[Path]) -> NoReturn:
    try:
        # `faulthandler` writes its first line, which names the signal, in several pieces.
        dump = b""
        while b"\n" not in dump and (piece := os.read(reader, _DUMP_BYTES)):
            dump += piece
        if dump:
            configure_logs()
            known = [(name, why) for text, (name, why) in _SIGNALS.items() if text.encode() in dump[:100]]
            name, reason = known[0] if known else ("a fatal error", _DEFECT)
            # Logged before the server has ended: in a container this process may end with it.
            _log.error("crashed", signal=name, reason=reason, directories=[str(path) for path in directories])
            logs.flush()
            while len(dump) < _DUMP_BYTES and (piece := os.read(reader, _DUMP_BYTES)):
                dump += piece
            _log.error("stacks of the crash", stacks=dump.decode(errors="replace"))
            logs.flush()
    except BaseException:  # noqa: BLE001 - a fork must not return to its caller
        traceback.print_exc()
    finally:
        os._exit(0)
