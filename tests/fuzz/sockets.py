"""Scripts of connections of the socket protocol: right and wrong frames, and checks of the answers.

A script opens one connection to the Unix socket, the TCP port, or the TCP port with TLS. It sends a
hello and frames, and reads what the server sends until the server closes the connection.
"""

from __future__ import annotations

import contextlib
import enum
import math
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from kvtier.cuda.host.socket_io import Connection, TlsConnection, checksum_on
from kvtier.protos.error_reasons import STATUS_OF, reason_within
from kvtier.protos.wire import socket_frames as frames
from kvtier.protos.wire.socket_frames import HEAD_BYTES, FrameKind, Purpose

from .served import Broken, Served
from .tape import Tape

__all__ = ["Fault", "Frame", "Way", "hello", "run"]

_HELLO_REASONS = {"UNKNOWN_SESSION", "STALE_EPOCH", "UNAUTHENTICATED", "WRONG_TENANT", "PERMISSION_DENIED", "NOT_READY"}
_WITHOUT_REASON = {"UNIMPLEMENTED", "RESOURCE_EXHAUSTED"}
"""Status of calls that no handler gets."""
_UNCLEAN = {"INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED"}
_SECONDS = 15.0
_LARGEST_ANSWER = 64 << 20


class Way(enum.IntEnum):
    """How a script connects."""

    UNIX = 0
    TCP = 1
    TLS = 2


_FIRST_CALL = (1 << 64) - 2
"""Number of a hello. The numbers of the calls wrap."""
_LOOKUP = b"CacheService/Lookup"

_WAYS = [*Way, Way.UNIX, Way.TCP, Way.UNIX, Way.TCP, Way.UNIX]
"""One in eight uses TLS, because a handshake takes long."""


class Fault(enum.IntEnum):
    """What is wrong with a hello."""

    NONE = 0
    TOKEN = 1
    NO_TOKEN = 2
    SESSION = 3
    EPOCH = 4
    PROTOCOL = 5
    """TLS with the application protocol of the other purpose."""
    BYTES = 6
    """Arbitrary bytes instead of TLS handshake and hello."""


class Frame(enum.IntEnum):
    """Step of a script."""

    CALL = 0
    DATA = 1
    END = 2
    READ = 3
    """Waits for an answer, for a short time."""
    BYTES = 4
    HEAD = 5
    """A head of any length and kind, without the rest."""
    OVERSIZED = 6
    """A call with a message of zeros, which may exceed the limit."""
    CROSSED = 7
    """A call, data or end with a number that does not fit, which ends the connection."""


def hello(way: Way, purpose: Purpose, fault: Fault = Fault.NONE, *, waits: bool = True, reads: bool = True) -> bytes:
    """The beginning of a script. `waits`: for the answer; `reads`: the connection is not reset."""
    return bytes((way, purpose - 1 + 3 * fault + 24 * (not waits), reads))


def run(servers: Sequence[Served], methods: Sequence[Any], tape: Tape) -> None:
    """Runs a script against the server without TLS or the one with TLS. Raises Broken."""
    _Script(servers, methods, tape).run()


def _name_of(method: Any) -> bytes:
    return f"{method.containing_service.name}/{method.name}".encode()


class _Script:
    def __init__(self, servers: Sequence[Served], methods: Sequence[Any], tape: Tape) -> None:
        self._way = _WAYS[tape.byte() % len(_WAYS)]
        self._server = servers[self._way is Way.TLS]
        self._methods = methods
        self._tape = tape
        choice = tape.byte()
        self._purpose = Purpose(1 + choice % 3)
        self._fault = Fault(choice // 3 % 8 % 7)
        self._waits = not choice // 24 % 2
        self._reads = tape.byte() % 4 > 0
        self._calls: deque[tuple[int, Any]] = deque()
        """Numbers and methods of the calls without an answer yet."""
        self._last_call = _FIRST_CALL
        self._reason: str | None = None
        self._has_greeting = False
        self._in_push = self._is_damaged = False
        self._oks = 0
        self._most_oks: float = math.inf if self._fault is Fault.BYTES else 0
        """Maximum number of calls that may succeed: those before a damaged Push."""

    def run(self) -> None:
        address = f"{self._server.path}.shm" if self._way is Way.UNIX else ("127.0.0.1", self._server.port)
        family = socket.AF_UNIX if self._way is Way.UNIX else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.connect(address)
            self._connection = Connection(sock)
            self._connection.set_deadline(_SECONDS)
            with contextlib.suppress(ConnectionError):
                self._begin(sock)
                while self._tape:
                    self._step()
            self._connection.set_deadline(_SECONDS)
            if not self._reads:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            while self._read_frame() is not None:
                pass

    def _begin(self, sock: socket.socket) -> None:
        server, ref = self._server, self._server.ref
        if self._fault is Fault.BYTES:
            self._send(self._tape.piece())
            return
        if self._way is Way.TLS:
            names = [frames.CALLS_PROTOCOL, frames.STREAMS_PROTOCOL]
            name = names[(self._purpose is Purpose.STREAMS) ^ (self._fault is Fault.PROTOCOL)]
            context = server.credentials.socket_context(name)
            self._connection = secure = TlsConnection(sock, context, server_hostname="127.0.0.1")
            secure.set_deadline(_SECONDS)
            secure.handshake()
        epoch = ref.epoch ^ (self._fault is Fault.EPOCH)
        session_id = bytes(16) if self._fault is Fault.SESSION else ref.session_id
        token = {Fault.TOKEN: "kvt_wrong", Fault.NO_TOKEN: ""}.get(self._fault, server.token)
        self._send(frames.pack_hello(self._purpose, session_id, epoch, _FIRST_CALL, token))
        if self._waits:
            self._check_greeting(self._read_frame())

    def _check_greeting(self, code: int | None) -> None:
        """Checks the answer to a hello: its code, None if the server has closed the connection."""
        wanted = self._fault is Fault.NONE or (self._fault is Fault.PROTOCOL and self._way is not Way.TLS)
        if self._way is Way.UNIX:
            wanted |= self._fault is Fault.NO_TOKEN or (self._fault is Fault.TOKEN and self._purpose < Purpose.STREAMS)
        else:
            wanted &= self._purpose is not Purpose.REGION
        fits = self._reason in _HELLO_REASONS or (self._reason == "INVALID_ARGUMENT" and self._way is Way.TLS)
        if wanted != (code == 0) or (code and not fits):
            refused = f"{code} {self._reason}" if code else code
            raise Broken(f"{self._way.name} {self._purpose.name} with fault {self._fault.name}: {refused}")
        if code is None:
            raise ConnectionError
        self._is_damaged = code != 0

    def _step(self) -> None:
        tape = self._tape
        match tape.byte() % len(Frame):
            case Frame.CALL:
                method, flags = self._methods[tape.byte() % len(self._methods)], tape.byte()
                message = self._server.message(method, flags, tape.piece())
                self._calls.append((self._next_number(), method))
                self._is_damaged |= self._in_push
                self._in_push = method.name == "Push" and self._purpose is Purpose.STREAMS
                self._expect(not self._in_push)
                self._send(frames.pack_call(self._last_call, _name_of(method), message))
            case Frame.DATA:
                offset, fault, payload = tape.number(), tape.byte(), tape.piece()
                wrong = [fault >> bit & 1 for bit in range(4)]  # of head, checksum, length, offset
                self._is_damaged |= self._in_push and any(wrong[:3])
                checksum = self._checksum(payload) ^ wrong[1]
                head = bytearray(self._data_head(offset << 47 * wrong[3], len(payload) + wrong[2], checksum))
                head[offset % len(head)] ^= wrong[0]
                self._send(head + payload)
            case Frame.END:
                self._expect(self._in_push)
                self._in_push = False
                self._send(frames.pack_end(self._last_call))
            case Frame.READ:
                # With TLS other records may be readable, and an answer does not follow.
                is_silent = self._way is Way.TLS or not self._calls
                if not is_silent and select.select([self._connection.socket], [], [], 0.01)[0]:
                    self._read_frame()
            case Frame.BYTES:
                self._expect(math.inf)
                self._send(tape.piece())
            case Frame.HEAD:
                self._expect(math.inf)
                self._send(
                    struct.pack("<IBQ", tape.number() << 8 * (tape.byte() % 3), tape.byte(), self._next_number())
                )
            case Frame.OVERSIZED:
                self._expect(math.inf)
                self._connection.set_deadline(1.0)  # the server does not read while it sends a Pull
                with contextlib.suppress(BlockingIOError):
                    self._send(frames.pack_call(self._next_number(), _LOOKUP, bytes(tape.number() << 6)))
                self._connection.set_deadline(_SECONDS)
            case Frame.CROSSED:
                self._send(self._crossed(tape.byte(), tape.number()))
                self._is_damaged = True

    def _next_number(self) -> int:
        self._last_call = (self._last_call + 1) % (1 << 64)
        return self._last_call

    def _data_head(self, offset: int, nbytes: int, checksum: int) -> bytes:
        return frames.pack_data_head(self._last_call, offset, nbytes, checksum)

    def _crossed(self, choice: int, distance: int) -> bytes:
        """Returns a frame of another call: that of another process, a repeated or an older one."""
        steps = [(1 + distance) << 32, -(1 + distance) << 32, 0, -1 - distance]
        number = (self._last_call + steps[choice % 4]) % (1 << 64)
        if not self._in_push:
            return frames.pack_call(number, _LOOKUP, b"")
        number ^= number == self._last_call
        if choice % 8 < 4:
            return frames.pack_data_head(number, 0, 1, self._checksum(b"x")) + b"x"
        return frames.pack_end(number)

    def _expect(self, oks: float) -> None:
        """Adds calls that may succeed, unless the server has got a damaged frame."""
        if not self._is_damaged:
            self._most_oks += oks

    def _send(self, data: bytes | bytearray) -> None:
        self._connection.send([memoryview(data)])

    def _checksum(self, payload: bytes) -> int:
        return checksum_on(self._connection, [memoryview(payload)])

    def _read_frame(self) -> int | None:
        """Reads and checks a frame; returns the code of an answer, None at the end."""
        try:
            head = self._connection.read(HEAD_BYTES)
            if head[4] == FrameKind.DATA:
                head += self._connection.read(frames.DATA_HEAD_BYTES - HEAD_BYTES)
                data = frames.unpack_data_head(head)
                self._check_number(data.number)
                if self._checksum(self._connection.read(data.nbytes)) != data.xxh3_64:
                    raise Broken("a Pull sends wrong bytes")
                return -1
            length, kind, number = frames.unpack_head(head)
            if kind is not FrameKind.ANSWER or length > _LARGEST_ANSWER:
                raise Broken(f"the server sends a frame of kind {kind.name} with {length} bytes")
            self._check_number(number)
            return self._check_answer(*frames.unpack_answer(self._connection.read(length)))
        except BlockingIOError:
            raise Broken(f"{self._way.name} {self._purpose.name}: no answer, and not closed") from None
        except OSError:
            return None
        except (ValueError, DecodeError) as error:
            raise Broken(f"the server sends wrong frames: {error}") from error

    def _check_number(self, number: int) -> None:
        """Checks the number in a frame of the server, unless arbitrary bytes were sent before."""
        if self._most_oks == math.inf:
            return
        expected = _FIRST_CALL if not self._has_greeting else self._calls[0][0] if self._calls else None
        if number != expected:
            raise Broken(f"the server sends a frame of call {number} instead of {expected}")

    def _check_answer(self, code: int, message: bytes) -> int:
        if not self._has_greeting:
            self._has_greeting = True
            method = None
        else:
            method = self._calls.popleft()[1] if self._calls else None
            self._oks += code == 0
        if self._oks > self._most_oks:
            raise Broken("a damaged Push is answered with OK")
        if code:
            status = status_pb2.Status.FromString(message)
            name, self._reason = frames.STATUS_OF_CODE[code].name, reason_within(status)
            known = STATUS_OF.get(self._reason or "")
            fits = known.name == name if known is not None else name in _WITHOUT_REASON
            if name in _UNCLEAN or not fits or status.code != code:
                raise Broken(f"{method and method.full_name}: {name}, reason {self._reason}: {status.message}")
        elif method is not None:
            with contextlib.suppress(DecodeError):  # of another call, after arbitrary bytes
                self._server.remember_ids(method, message)
        return code
