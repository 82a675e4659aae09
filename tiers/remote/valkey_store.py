"""Client of one Valkey or Redis server: `ObjectStore` on a connection of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ..secondary_tier import Outcome
from .object_store import UNREADABLE_BYTES, StoreRefusedError, StoreUnavailableError
from .resp import Answer, ErrorAnswer, Piece, RespConnection, command

__all__ = ["ValkeyStore", "check"]

T = TypeVar("T")

REQUESTED_BYTES = 1 << 20
"""Limit of the values that are requested and not yet received, if they are more than two.

With more, the server collects its answers in memory that its processor does not cache.
"""

SENT_BYTES = 256 << 10
"""Values are sent when they have this many bytes together, while the next ones are encoded."""

DELETE_IF_EQUAL = b"if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end return 0"
"""Script: Valkey has `DELIFEQ` since version 9, Redis has no such command in version 8.2."""

_MOVED = frozenset(("MOVED", "ASK", "TRYAGAIN"))
"""Errors of a name that another node of a cluster has. They are never followed: the nodes are read
again from a node that is known."""
_WRONG_TYPE = "WRONGTYPE"
"""Error of a name whose value is no string."""
_UNAVAILABLE = frozenset(("CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY"))
"""Errors of a node that has no data now. A new connection may reach another one."""


class ValkeyStore:
    """`ObjectStore` that connects on first use, and again after an error."""

    def __init__(
        self, dial: Callable[[float], RespConnection], deadline_seconds: float, moved: Callable[[], None]
    ) -> None:
        """`dial` connects until a time on the monotonic clock, and authenticates.

        `moved` is called if another node has a name.
        """
        self._dial = dial
        self._deadline_seconds = deadline_seconds
        self._moved = moved
        self._connection: RespConnection | None = None
        self._is_closed = False

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        return [answer == 1 for answer in self.run([command(b"EXISTS", name) for name in names])]

    def renew(self, names: Sequence[bytes], ttl_seconds: float) -> list[bool]:
        ttl = _seconds(ttl_seconds)
        return [answer == 1 for answer in self.run([command(b"EXPIRE", name, ttl) for name in names])]

    def get(
        self, names: Sequence[bytes], values: Sequence[Sequence[memoryview]], ttl_seconds: float
    ) -> Iterator[int | None]:
        ttl = _seconds(ttl_seconds)
        requests = [command(b"GET", name) + command(b"EXPIRE", name, ttl) for name in names]

        def begin(connection: RespConnection) -> Iterator[int | ErrorAnswer | None]:
            answers = _get(connection, requests, values)
            return itertools.chain(list(itertools.islice(answers, 1)), answers)

        answers = self._exchange(begin)
        # No other call may use the connection before all answers are received.
        connection, self._connection = self._connection, None
        if connection is None:
            raise StoreUnavailableError("the client was closed")
        received = []
        try:
            for answer in answers:
                received.append(answer)
                yield _size_in(answer)
        except BaseException:
            connection.close()
            raise
        if self._is_closed or self._connection is not None:
            connection.close()
        else:
            self._connection = connection
        # An error of one name is a miss of this name only.
        errors = [answer for answer in received if isinstance(answer, ErrorAnswer)]
        if len(errors) < len(received):
            errors = [error for error in errors if error.code in _MOVED | _UNAVAILABLE]
        self._checked(errors)

    def put(
        self, names: Sequence[bytes], value_of: Callable[[int], Sequence[Piece]], ttl_seconds: float
    ) -> list[Outcome]:
        ttl = _seconds(ttl_seconds)
        end = b"\r\n$2\r\nNX\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)

        def exchange(connection: RespConnection) -> list[Answer]:
            pieces: list[Piece] = []
            nbytes = 0
            for number, name in enumerate(names):
                value = value_of(number)
                size = sum(map(len, value))
                pieces += [b"*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size), *value, end]
                nbytes += size
                if nbytes >= SENT_BYTES:
                    connection.send(pieces)
                    pieces, nbytes = [], 0
            return _send_and_read(connection, pieces, len(names))

        return [_outcome(answer) for answer in self._checked(self._exchange(exchange))]

    def delete_if_equal(self, name: bytes, value: Sequence[Piece]) -> None:
        start = b"*5\r\n$4\r\nEVAL\r\n$%d\r\n%b\r\n$1\r\n1\r\n" % (len(DELETE_IF_EQUAL), DELETE_IF_EQUAL)
        start += b"$%d\r\n%b\r\n$%d\r\n" % (len(name), name, sum(map(len, value)))
        self._checked(self._exchange(lambda connection: _send_and_read(connection, [start, *value, b"\r\n"], 1)))

    def ping(self) -> None:
        self.run([command(b"PING")])

    def close(self) -> None:
        self._is_closed = True
        self._disconnect()

    def run(self, commands: Sequence[bytes]) -> list[Answer]:
        """Sends commands at once; returns their answers. Raises StoreRefusedError and others.

        An error of a name that has moved is an answer.
        """
        return self._checked(
            self._exchange(lambda connection: _send_and_read(connection, [b"".join(commands)], len(commands)))
        )

    def _checked(self, answers: list[T]) -> list[T]:
        has_moved = False
        for answer in answers:
            if isinstance(answer, ErrorAnswer) and answer.code in _UNAVAILABLE:
                self._disconnect()
            has_moved |= check(answer)
        if has_moved:
            self._moved()
        return answers

    def _exchange(self, exchange: Callable[[RespConnection], T]) -> T:
        """Sends commands and returns their answers. Connects if necessary.

        The server may have closed the connection while it was not used. Then a new one is used: no
        harm is done if the server gets a command twice.
        """
        ends_at = time.monotonic() + self._deadline_seconds
        is_new = self._connection is None
        try:
            return self._exchange_once(exchange, ends_at)
        except StoreUnavailableError:
            if is_new or self._is_closed or time.monotonic() >= ends_at:
                raise
            return self._exchange_once(exchange, ends_at)

    def _exchange_once(self, exchange: Callable[[RespConnection], T], ends_at: float) -> T:
        if self._connection is None:
            self._connection = self._dial(ends_at)
        connection = self._connection
        connection.set_deadline(ends_at)
        try:
            connection.check_unused()
            return exchange(connection)
        except BaseException:
            self._disconnect()  # the rest of the answers would be taken for those of the next call
            raise

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def check(answer: object) -> bool:
    """Returns whether an answer says that the name has moved. Raises for other errors.

    A server without memory is no error, and neither is a value of another type.
    """
    if not isinstance(answer, ErrorAnswer) or answer.code in ("OOM", _WRONG_TYPE):
        return False
    if answer.code in _MOVED:
        return True
    if answer.code == "CLUSTERDOWN":
        advice = "the cluster is down; set cluster-require-full-coverage to no, so that the other nodes go on"
        raise StoreUnavailableError(f"{answer.text}: {advice}")
    raise (StoreUnavailableError if answer.code in _UNAVAILABLE else StoreRefusedError)(answer.text)


def _send_and_read(connection: RespConnection, pieces: Sequence[Piece], count: int) -> list[Answer]:
    connection.send(pieces)
    return [connection.read() for _ in range(count)]


def _get(
    connection: RespConnection, requests: Sequence[bytes], values: Sequence[Sequence[memoryview]]
) -> Iterator[int | ErrorAnswer | None]:
    """Sends each request early enough that the server always has one to answer."""
    sizes = [sum(map(len, pieces)) for pieces in values]
    requested, requested_bytes = 0, 0
    for number, pieces in enumerate(values):
        first = requested
        # Half of the window at a time: fewer system calls.
        if requested <= number + 1 or requested_bytes <= REQUESTED_BYTES // 2:
            while requested < len(requests) and (
                requested <= number + 1 or requested_bytes + sizes[requested] <= REQUESTED_BYTES
            ):
                requested_bytes += sizes[requested]
                requested += 1
        if requested > first:
            connection.send([b"".join(requests[first:requested])])
        answer = connection.read_value(pieces)
        connection.read()  # a user who may only read cannot renew
        requested_bytes -= sizes[number]
        yield answer


def _size_in(answer: int | ErrorAnswer | None) -> int | None:
    if isinstance(answer, ErrorAnswer):
        return UNREADABLE_BYTES if answer.code == _WRONG_TYPE else None
    return answer


def _outcome(answer: Answer) -> Outcome:
    if isinstance(answer, ErrorAnswer):
        return Outcome.NO_SPACE if answer.code == "OOM" else Outcome.FAILED
    return Outcome.DONE  # None: the store already has a value


def _seconds(duration: float) -> bytes:
    return b"%d" % max(1, round(duration))
