"""Broker client in the child: its streams request slots from the server's broker.

The broker can end each stream at any time. One thread reads its messages. Each stream waits for
answers on its own thread. The process exits when the socket closes.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

from ...tiers.core.byte_ranges import MAX_GAPS, ByteRanges
from ..process.child_main import Channel
from ..refused import Refused
from .messages import (
    Accepted,
    Begin,
    Caller,
    Committed,
    Damaged,
    Detached,
    End,
    FromChild,
    Granted,
    Handshake,
    Listening,
    Moved,
    Ping,
    Pong,
    Refusal,
    Setup,
    ToChild,
    decode_to_child,
    encode,
)

__all__ = ["BrokerClient", "PushedStore", "Stream"]

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 10.0
_REPORT_BYTES = 8 << 20
"""Bytes between two progress reports. Each report wakes the server. If the connection breaks, the
client sends unreported bytes again."""
_REPORT_RANGES = 64
"""Number of separate ranges of bytes between two progress reports."""
_SLOWEST_RATE = 1 << 20
"""Minimum average bytes per second. A slower stream is ended, because it occupies a thread."""
_GRACE_SECONDS = 30.0
"""Extra time for each stream, for a short network outage or a busy server."""
_FIRST_SECONDS = 10.0
"""Maximum time until the client has sent its first message and the broker has answered it."""
_WATCH_SECONDS = 1.0
_REPORT_SECONDS = 1.0
"""Maximum time between two reports of a slow stream. Each report renews its store or lease."""


class _Access:
    """Access of a stream to the region. A refused stream detaches at its end."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        with self._stream.changed:
            self._stream.is_active = True

    def __exit__(self, *_: object) -> None:
        with self._stream.changed:
            self._stream.is_active = False
        self._stream.detach_if_refused()


class PushedStore:
    """Received bytes of a store, shared by the Push streams of this process that write to it.

    A stream must not overwrite received bytes: if its frame is cut off or damaged, the store would
    contain bad bytes. Nor may two streams write to the same bytes at once. All methods are
    thread-safe.
    """

    def __init__(self) -> None:
        self._received = ByteRanges()
        self._writing: dict[Stream, tuple[int, int]] = {}
        self._changed = threading.Condition()

    def add(self, received: Sequence[int], parts: int) -> None:
        """Adds ranges that the server knows. `parts`: number of parts of the store."""
        with self._changed:
            self._received.most = max(self._received.most, parts + MAX_GAPS // 2)
            for start, end in zip(received[::2], received[1::2], strict=True):
                self._received.add(start, end)

    def begin_frame(self, stream: Stream, start: int, end: int) -> list[tuple[int, int]]:
        """Returns the ranges of a frame that the stream may write to, until `end_frame`.

        Ends other streams that are writing to these bytes: the client has probably given them up.
        Raises `Refused` if they do not end in time.
        """
        with self._changed:
            while others := [one for one, (low, high) in self._writing.items() if low < end and start < high]:
                for other in others:
                    other.abort()
                if not self._changed.wait(_ANSWER_SECONDS):
                    raise Refused("LIMIT_EXCEEDED", "another stream of the store does not end in time")
            gaps = self._received.gaps(start, end)
            self._writing[stream] = (start, end)
            return gaps

    def end_frame(self, stream: Stream, *, arrived: bool) -> None:
        """Records the end of a frame. Raises `Refused` if the store has too many gaps."""
        with self._changed:
            start, end = self._writing.pop(stream)
            self._changed.notify_all()
            if arrived and not self._received.add(start, end):
                raise Refused("LIMIT_EXCEEDED", "the frames leave too many gaps between received bytes")

    def has_all(self, total: int) -> bool:
        with self._changed:
            return self._received.covers(0, total)


class Stream:
    def __init__(
        self,
        broker: BrokerClient,
        number: int,
        caller: Caller,
        abort: Callable[[], object],
    ) -> None:
        """`abort` ends the stream's connection, and so unblocks a thread in `touching`."""
        self.number = number
        self.received = 0
        """Bytes of all frames so far; repeated bytes count again."""
        self.abort = abort
        self._caller = caller
        self.slots: Sequence[int] = ()
        self.sizes: Sequence[int] = ()
        self.is_active = False
        """Whether the stream accesses the region."""
        self.changed = threading.Condition()
        self._broker = broker
        self._answer: Granted | Accepted | Committed | None = None
        self._refusal: Refusal | None = None
        self._has_detached = False
        self.store = PushedStore()
        """The store of a Push."""
        self._ranges: list[int] = []
        """Start and end of each range of a Push that the server does not know."""
        self._unreported = 0
        self._began_at = self._reported_at = time.monotonic()

    @property
    def touching(self) -> _Access:
        """Context in which the stream accesses the region."""
        return _Access(self)  # not kept: a cycle would keep the slots of long streams in memory

    def is_too_slow(self, now: float) -> bool:
        bytes_due = min(self.received, sum(self.sizes))
        seconds = _GRACE_SECONDS + bytes_due / _SLOWEST_RATE if self.sizes else _FIRST_SECONDS
        return now > self._began_at + seconds

    def check(self) -> None:
        """Raises `Refused` if the server has ended the stream. Call it within `touching`."""
        if self._refusal is not None:
            raise Refused(self._refusal.reason, self._refusal.text)

    def handshake(self) -> str:
        """Asks the server to accept the connection; returns its tenant. Raises `Refused`."""
        self._broker.send(Handshake(self.number, self._caller))
        answer = self._wait()
        return answer.tenant if isinstance(answer, Accepted) else ""

    def begin(self, target: int, items: Sequence[int] | None = None) -> None:
        """Requests the slots of a store, or of the `items` of a lease. Raises `Refused`."""
        # Before the message: the answer lacks what other streams, which may end now, report later.
        store = self._broker.pushed_store(target) if items is None else self.store
        self._broker.send(Begin(self.number, self._caller, items is None, target, list(items or ())))
        answer = self._wait()
        if isinstance(answer, Granted):
            self.slots, self.sizes = answer.slots, answer.sizes
            if items is None:
                store.add(answer.received, len(answer.sizes))
                self.store = store

    def moved(self, start: int, nbytes: int) -> None:
        """Records a transferred frame, and reports progress to the server when a report is due.

        Call with `touching` held, so that the last report follows all frames.
        """
        if self._ranges and self._ranges[-1] == start:
            self._ranges[-1] += nbytes
        else:
            self._ranges += (start, start + nbytes)
        self.received += nbytes
        self._unreported += nbytes
        if (
            self._unreported >= _REPORT_BYTES
            or len(self._ranges) > 2 * _REPORT_RANGES
            or time.monotonic() - self._reported_at >= _REPORT_SECONDS
        ):
            self._report()

    def damaged(self) -> None:
        self._broker.send(Damaged(self.number))

    def end(self, code: str, *, complete: bool = False) -> None:
        """Reports the end. With `complete`, call `wait_committed` for the server's answer."""
        self._broker.send(End(self.number, code, complete, *self._take_progress()))

    def wait_committed(self) -> bool:
        """Waits; returns False if another stream still writes to the store. Raises `Refused`."""
        answer = self._wait()
        return isinstance(answer, Committed) and answer.completed

    def answer(self, message: Granted | Accepted | Committed | Refusal) -> None:
        """Handles a message of the server. Called by the reading thread, so it never waits."""
        with self.changed:
            if isinstance(message, Refusal):
                self._refusal = message
            else:
                self._answer = message
            self.changed.notify()
        if isinstance(message, Refusal):
            if self.is_active:
                self.abort()  # the stream's thread then leaves `touching`, and detaches
            else:
                self.detach_if_refused()

    def detach_if_refused(self) -> None:
        """Reports once that a refused stream does not access the region any more."""
        with self.changed:
            if self._refusal is None or self._has_detached or self.is_active:
                return
            self._has_detached = True
            detached = Detached(self.number, *self._take_progress())
        self._broker.send(detached)

    def _report(self) -> None:
        if self._unreported:
            self._broker.send(Moved(self.number, *self._take_progress()))
            self._reported_at = time.monotonic()

    def _take_progress(self) -> tuple[int, list[int]]:
        with self.changed:
            nbytes, self._unreported = self._unreported, 0
            ranges, self._ranges = self._ranges, []
            return nbytes, ranges

    def _wait(self) -> Granted | Accepted | Committed | None:
        with self.changed:
            self.changed.wait_for(lambda: self._answer or self._refusal, _ANSWER_SECONDS)
            answer, self._answer = self._answer, None
        if answer is None:
            self.check()
            raise Refused("LIMIT_EXCEEDED", "the server has not answered its bulk process in time")
        return answer


class BrokerClient:
    """Connection to the broker. Call `setup` first, then `start` and `listening`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages = iter(channel)
        self._numbers = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._stores: WeakValueDictionary[int, PushedStore] = WeakValueDictionary()
        self._lock = threading.Lock()

    def setup(self) -> Setup:
        """Returns the server's first message. Exits the process if the server has ended."""
        for _, payload in self._messages:
            message = decode_to_child(payload)
            if isinstance(message, Setup):
                return message
        os._exit(0)  # the server has ended

    def listening(self) -> None:
        """Reports that this process serves. Then the server passes connections."""
        self.send(Listening())

    def slower(self, subject: str, cause: str = "") -> None:
        """See `Channel.slower`."""
        self._channel.slower(subject, cause)

    def start(self) -> None:
        """Starts the reading thread, and one that ends slow streams."""
        threading.Thread(target=self._watch, name="kvtier-pace", daemon=True).start()
        threading.Thread(target=self._run, name="kvtier-broker", daemon=True).start()

    def open(self, caller: Caller, abort: Callable[[], object]) -> Stream:
        """Returns a new stream; call `close` when it has ended. For `abort` see `Stream`."""
        stream = Stream(self, next(self._numbers), caller, abort)
        self._streams[stream.number] = stream
        return stream

    def close(self, stream: Stream) -> None:
        self._streams.pop(stream.number, None)

    def pushed_store(self, store_id: int) -> PushedStore:
        """Returns the state of a store, which all its running streams share."""
        with self._lock:
            return self._stores.setdefault(store_id, PushedStore())

    def send(self, message: FromChild) -> None:
        with suppress(OSError):  # the server has ended; the reading thread exits the process
            self._channel.send({}, encode(message))

    def _watch(self) -> None:
        while True:
            time.sleep(_WATCH_SECONDS)
            now = time.monotonic()
            for stream in list(self._streams.values()):
                if stream.is_too_slow(now):
                    _log.warning("a stream is too slow and is ended after %d bytes", stream.received)
                    stream.abort()

    def _run(self) -> None:
        try:
            for _, payload in self._messages:
                self._take(decode_to_child(payload))
        finally:
            os._exit(0)

    def _take(self, message: ToChild) -> None:
        if isinstance(message, Setup):
            raise ValueError("a second setup message")  # noqa: TRY004 - the type is valid, not the order
        if isinstance(message, Ping):
            self.send(Pong())
            return
        stream = self._streams.get(message.stream)
        if stream is not None:
            stream.answer(message)
        elif isinstance(message, Refusal):
            self.send(Detached(message.stream))
