"""Child side of the socket pair: streams ask the server's broker, which can end any of them.

One thread reads messages. Each stream waits for its answers on its own thread. The process exits
when the socket closes.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ...protos.v1 import common_pb2
from ..process.child_main import Channel
from ..refused import Refused
from .messages import (
    Begin,
    Committed,
    Damaged,
    Detached,
    End,
    FromChild,
    Granted,
    Listening,
    Moved,
    Refusal,
    Setup,
    ToChild,
    decode_to_child,
    encode,
)

__all__ = ["BrokerClient", "Stream"]

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 10.0
_REPORT_BYTES = 8 << 20
"""Bytes between two progress reports. Each wakes the server; unreported bytes are sent again."""
_SLOWEST_RATE = 1 << 20
"""Minimum average bytes per second. A slower stream is ended to free its thread."""
_GRACE_SECONDS = 30.0
"""Extra time for each stream, for a short network outage or a busy server."""
_FIRST_SECONDS = 10.0
"""Maximum time until the stream's first message has arrived and the server has answered it."""
_WATCH_SECONDS = 1.0
_REPORT_SECONDS = 1.0
"""Maximum time between two reports of a slow stream. Each report renews its lease."""


class Stream:
    def __init__(
        self,
        broker: BrokerClient,
        number: int,
        transport: str,
        interrupt: Callable[[], object],
        abort: Callable[[], object],
    ) -> None:
        """`interrupt` unblocks a holder of `touching`; `abort` ends the stream in any state."""
        self.number = number
        self.transport = transport
        self.received = 0
        """Bytes of all frames."""
        self.abort = abort
        self.credentials: tuple[str | None, list[str], bool] = (None, [], True)
        """Bearer token, certificate names, and whether the client came over a Unix socket."""
        self._interrupt = interrupt
        self.slots: Sequence[int] = ()
        self.sizes: Sequence[int] = ()
        self.touching = threading.Lock()
        """Held while the stream accesses the region."""
        self._broker = broker
        self._changed = threading.Condition()
        self._answer: Granted | Committed | None = None
        self._refusal: Refusal | None = None
        self._start = self._end = -1
        self._unreported = 0
        self._began_at = self._reported_at = time.monotonic()

    def is_too_slow(self, now: float) -> bool:
        """Returns whether the stream is below the minimum rate; repeated bytes count once."""
        bytes_due = min(self.received, sum(self.sizes))
        seconds = _GRACE_SECONDS + bytes_due / _SLOWEST_RATE if self.sizes else _FIRST_SECONDS
        return now > self._began_at + seconds

    def check(self) -> None:
        """Raises `Refused` if the server has ended the stream. Call with `touching` held."""
        if self._refusal is not None:
            raise Refused(self._refusal.reason, self._refusal.text)

    def begin(self, ref: common_pb2.SessionRef, target: int, items: Sequence[int] | None = None) -> None:
        """Requests the slots of a store, or those of `items` of a lease. Raises `Refused`."""
        push = items is None
        self._broker.send(
            Begin(
                self.number,
                push,
                ref.session_id,
                ref.epoch,
                target,
                self.transport,
                list(items or ()),
                *self.credentials,
            )
        )
        answer = self._wait()
        if isinstance(answer, Granted):
            self.slots, self.sizes = answer.slots, answer.sizes

    def moved(self, start: int, nbytes: int) -> None:
        """Records a moved frame, and reports progress to the server when it is due."""
        if self._end < 0:
            self._start = self._end = start
        if start == self._end:
            self._end += nbytes
        self.received += nbytes
        self._unreported += nbytes
        if self._unreported >= _REPORT_BYTES or time.monotonic() - self._reported_at >= _REPORT_SECONDS:
            self._report()

    def covers(self, total: int) -> bool:
        """Returns whether bytes 0 to `total` were moved in order; bytes sent twice do not count."""
        return self._start == 0 and self._end == total

    def damaged(self) -> None:
        self._broker.send(Damaged(self.number))

    def end(self, code: str, *, complete: bool = False) -> None:
        """Reports the end; if `complete`, `wait_committed` returns the server's answer."""
        self._broker.send(End(self.number, code, complete, *self._take_progress()))

    def wait_committed(self) -> bool:
        """Returns whether the store or load was completed, once it is known. Raises `Refused`."""
        answer = self._wait()
        return isinstance(answer, Committed) and answer.completed

    def answer(self, message: Granted | Committed | Refusal) -> None:
        """Handles a message of the server. Called by the reading thread."""
        if isinstance(message, Refusal):
            self._refusal = message
            if self.touching.locked():
                self._interrupt()
            with self.touching:  # wait until the stream has left the region
                pass
        with self._changed:
            if not isinstance(message, Refusal):
                self._answer = message
            self._changed.notify()

    def _report(self) -> None:
        if self._unreported:
            self._broker.send(Moved(self.number, *self._take_progress()))
            self._reported_at = time.monotonic()

    def _take_progress(self) -> tuple[int, int, int]:
        nbytes, self._unreported = self._unreported, 0
        return nbytes, max(self._start, 0), max(self._end, 0)

    def _wait(self) -> Granted | Committed | None:
        with self._changed:
            self._changed.wait_for(lambda: self._answer or self._refusal, _ANSWER_SECONDS)
            answer, self._answer = self._answer, None
        if answer is None:
            self.check()
            raise Refused("LIMIT_EXCEEDED", "the server has not answered its bulk process in time")
        return answer


class BrokerClient:
    """Connection to the broker. Call `setup` first, then `start`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages = iter(channel)
        self._numbers = itertools.count(1)
        self._streams: dict[int, Stream] = {}

    def setup(self) -> Setup:
        """Returns the first message of the server; exits the process if the server has ended."""
        for _, payload in self._messages:
            message = decode_to_child(payload)
            if isinstance(message, Setup):
                return message
        os._exit(0)  # the server has ended

    def start(self, port: int, tcp_port: int) -> None:
        """Reports the ports, then starts the thread that reads and one that ends slow streams."""
        self.send(Listening(port, tcp_port))
        threading.Thread(target=self._watch, name="kvtier-pace", daemon=True).start()
        threading.Thread(target=self._run, name="kvtier-broker", daemon=True).start()

    def open(
        self, transport: str, abort: Callable[[], object], interrupt: Callable[[], object] = lambda: None
    ) -> Stream:
        """Returns a new stream; call `close` when it has ended. See `Stream` for the callbacks."""
        stream = Stream(self, next(self._numbers), transport, interrupt, abort)
        self._streams[stream.number] = stream
        return stream

    def close(self, stream: Stream) -> None:
        self._streams.pop(stream.number, None)

    def send(self, message: FromChild) -> None:
        with suppress(OSError):  # the reading thread notices that the server has ended
            self._channel.send({}, encode(message))

    def _watch(self) -> None:
        while True:
            time.sleep(_WATCH_SECONDS)
            now = time.monotonic()
            for stream in list(self._streams.values()):
                if stream.is_too_slow(now):
                    _log.warning("a stream of %d bytes so far is too slow and is ended", stream.received)
                    stream.abort()

    def _run(self) -> None:
        try:
            for _, payload in self._messages:
                self._take(decode_to_child(payload))
        finally:
            os._exit(0)

    def _take(self, message: ToChild) -> None:
        if isinstance(message, Setup):
            raise ValueError("a second setup")  # noqa: TRY004 - out of place, not of a wrong type
        stream = self._streams.get(message.stream)
        if stream is not None:
            stream.answer(message)
        if isinstance(message, Refusal):
            self.send(Detached(message.stream))
