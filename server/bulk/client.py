"""The child's side of the socket pair: streams ask, the server answers, and may end any of them.

One thread reads; streams wait for their answers on threads of their own. The end of the socket is the end of the process.
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
"""How often the server hears of progress. Each time costs it a wake-up; what it has not heard of is sent again after a break."""
_SLOWEST_RATE = 1 << 20
"""Bytes per second, on average, that a stream must move; less, and it is ended: its thread is wanted by others."""
_GRACE_SECONDS = 30.0
"""What it gets on top of that: a link may be down for a while, or a server busy."""
_FIRST_SECONDS = 10.0
"""How long it may take until it is known whose it is."""
_WATCH_SECONDS = 1.0
_REPORT_SECONDS = 1.0
"""How often it hears of it where little comes: each time renews the lease of what is moved."""


class Stream:
    """One Push or Pull, as the server knows it."""

    def __init__(
        self,
        control: BrokerClient,
        number: int,
        transport: str,
        interrupt: Callable[[], object],
        give_up: Callable[[], object],
    ) -> None:
        """`interrupt` ends what holds `touching` for long, `give_up` whatever the stream waits for."""
        self.number = number
        self.transport = transport
        self.received = 0
        """Bytes of all frames so far."""
        self.give_up = give_up
        self.shown: tuple[str | None, list[str], bool] = (None, [], True)
        """What its client has shown: token, names of a certificate, whether it came by a Unix socket."""
        self._interrupt = interrupt
        self.slots: Sequence[int] = ()
        self.sizes: Sequence[int] = ()
        self.touching = threading.Lock()
        """Held while the region is touched on behalf of this stream."""
        self._control = control
        self._news = threading.Condition()
        self._answer: Granted | Committed | None = None
        self._refusal: Refusal | None = None
        self._start = self._end = -1
        self._unsaid = 0
        self._began_at = self._said_at = time.monotonic()

    def late(self, now: float) -> bool:
        """Returns whether a client has taken much longer than its bytes need, and so holds a thread for itself.

        Bytes that come twice are no excuse: what was asked for has an end.
        """
        bytes_due = min(self.received, sum(self.sizes))
        seconds = _GRACE_SECONDS + bytes_due / _SLOWEST_RATE if self.sizes else _FIRST_SECONDS
        return now > self._began_at + seconds

    def check(self) -> None:
        """Raises `Refused` if the server has ended the stream. Called with `touching` held."""
        if self._refusal is not None:
            raise Refused(self._refusal.reason, self._refusal.text)

    def begin(self, ref: common_pb2.SessionRef, target: int, items: Sequence[int] | None = None) -> None:
        """Asks for the slots of a store, or for those of items of a lease. Raises `Refused`."""
        push = items is None
        self._control.send(
            Begin(self.number, push, ref.session_id, ref.epoch, target, self.transport, list(items or ()), *self.shown)
        )
        answer = self._wait()
        if isinstance(answer, Granted):
            self.slots, self.sizes = answer.slots, answer.sizes

    def moved(self, start: int, nbytes: int) -> None:
        """Takes note of a frame that was moved, and tells the server now and then."""
        if self._end < 0:
            self._start = self._end = start
        if start == self._end:
            self._end += nbytes
        self.received += nbytes
        self._unsaid += nbytes
        if self._unsaid >= _REPORT_BYTES or time.monotonic() - self._said_at >= _REPORT_SECONDS:
            self._report()

    def covers(self, total: int) -> bool:
        """Returns whether every byte of a sequence has been moved, one after the other: bytes that come twice do not count."""
        return self._start == 0 and self._end == total

    def damaged(self) -> None:
        """Has a damaged frame counted."""
        self._control.send(Damaged(self.number))

    def end(self, code: str, *, complete: bool = False) -> None:
        """Says that the stream has ended, and whether what it was for is to be completed: `settled` has the answer."""
        self._control.send(End(self.number, code, complete, *self._news_of_bytes()))

    def settled(self) -> bool:
        """Waits, and returns whether what was to be completed is. Raises `Refused`."""
        answer = self._wait()
        return isinstance(answer, Committed) and answer.completed

    def answer(self, message: Granted | Committed | Refusal) -> None:
        """Takes in what the server says of this stream. Called by the thread that reads."""
        if isinstance(message, Refusal):
            self._refusal = message
            if self.touching.locked():
                self._interrupt()
            with self.touching:  # it is not, from here on
                pass
        with self._news:
            if not isinstance(message, Refusal):
                self._answer = message
            self._news.notify()

    def _report(self) -> None:
        if self._unsaid:
            self._control.send(Moved(self.number, *self._news_of_bytes()))
            self._said_at = time.monotonic()

    def _news_of_bytes(self) -> tuple[int, int, int]:
        nbytes, self._unsaid = self._unsaid, 0
        return nbytes, max(self._start, 0), max(self._end, 0)

    def _wait(self) -> Granted | Committed | None:
        with self._news:
            self._news.wait_for(lambda: self._answer or self._refusal, _ANSWER_SECONDS)
            answer, self._answer = self._answer, None
        if answer is None:
            self.check()
            raise Refused("LIMIT_EXCEEDED", "the server has not answered its bulk process in time")
        return answer


class BrokerClient:
    """The connection to the server. `setup` comes first, then `start`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages = iter(channel)
        self._numbers = itertools.count(1)
        self._streams: dict[int, Stream] = {}

    def setup(self) -> Setup:
        """Returns the server's first word; ends the process if there is none."""
        for _, payload in self._messages:
            message = decode_to_child(payload)
            if isinstance(message, Setup):
                return message
        os._exit(0)  # the server has ended, and with it whatever this process was for

    def start(self, port: int, plain_port: int) -> None:
        """Tells the server that it is served, and reads what it says from now on; streams that are too slow are ended."""
        self.send(Listening(port, plain_port))
        threading.Thread(target=self._watch, name="kvtier-pace", daemon=True).start()
        threading.Thread(target=self._run, name="kvtier-control", daemon=True).start()

    def open(
        self, transport: str, give_up: Callable[[], object], interrupt: Callable[[], object] = lambda: None
    ) -> Stream:
        """Returns a new stream; `close` must follow.

        `interrupt` ends what it waits for while it touches the region, `give_up` whatever it waits for.
        """
        stream = Stream(self, next(self._numbers), transport, interrupt, give_up)
        self._streams[stream.number] = stream
        return stream

    def close(self, stream: Stream) -> None:
        """Forgets a stream that has ended."""
        self._streams.pop(stream.number, None)

    def send(self, message: FromChild) -> None:
        """Says something to the server."""
        with suppress(OSError):  # a server that is gone is noticed by the thread that reads
            self._channel.send({}, encode(message))

    def _watch(self) -> None:
        while True:
            time.sleep(_WATCH_SECONDS)
            now = time.monotonic()
            for stream in list(self._streams.values()):
                if stream.late(now):
                    _log.warning("a stream of %d bytes so far is too slow and is ended", stream.received)
                    stream.give_up()

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
