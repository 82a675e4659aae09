"""Server's end of ZMTP 3.1, the protocol of ZeroMQ: handshake, frames, subscriptions, requests.

Pure: no I/O. All limits are checked before bytes are kept, so a peer makes a connection hold at
most one frame of `MAX_FRAME_BYTES`. The specification is https://rfc.zeromq.org/spec/37/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

__all__ = [
    "MAX_FRAME_BYTES",
    "Frame",
    "Mechanism",
    "NullMechanism",
    "Peer",
    "ProtocolError",
    "metadata",
    "named",
    "wire_of",
]

MAX_FRAME_BYTES: Final = 2048
"""Longest frame of a peer: subscriptions, requests and handshakes need fewer bytes."""
_MAX_MESSAGE_FRAMES = 4
_GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION = b"\x03\x01"
_MORE, _LONG, _COMMAND = 1, 2, 4
_MAX_SHORT = 255
_PING_TTL_BYTES, _MAX_PING_CONTEXT = 2, 16


class ProtocolError(Exception):
    """The peer does not speak the protocol, or is not permitted; its connection must be closed."""


class Frame(NamedTuple):
    body: bytes
    has_more: bool = False
    is_command: bool = False


def wire_of(frame: Frame) -> bytes:
    body = frame.body
    flags = _MORE * frame.has_more | _COMMAND * frame.is_command
    if len(body) > _MAX_SHORT:
        return b"".join([bytes([flags | _LONG]), len(body).to_bytes(8, "big"), body])
    return bytes([flags, len(body)]) + body


def named(name: bytes, body: bytes = b"") -> bytes:
    """Returns the body of a command."""
    return bytes([len(name)]) + name + body


def metadata(socket_type: bytes) -> bytes:
    """Returns the properties that each end tells the other one."""
    return named(b"Socket-Type") + len(socket_type).to_bytes(4, "big") + socket_type


def _properties(data: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        begin = position + 1 + data[position]
        end = begin + 4 + int.from_bytes(data[begin : begin + 4], "big")
        if end > len(data):
            raise ProtocolError("a property exceeds its command")
        found[data[position + 1 : begin].lower()] = data[begin + 4 : end]
        position = end
    return found


class Mechanism(Protocol):
    """Security mechanism of one connection."""

    name: bytes

    def begin(self) -> bytes:
        """Returns the command to send after the greetings; empty if the client begins."""
        ...

    def handshake(self, body: bytes) -> tuple[bytes, bytes | None]:
        """Handles a command of the handshake; returns the answer, at the end with the properties.

        Raises ProtocolError.
        """
        ...

    def open(self, frame: Frame) -> Frame:
        """Returns the frame that the peer has sealed. Raises ProtocolError."""
        ...

    def seal(self, frame: Frame) -> Frame: ...


class NullMechanism:
    """No authentication and no encryption."""

    name = b"NULL"

    def __init__(self, socket_type: bytes) -> None:
        self._socket_type = socket_type

    def begin(self) -> bytes:
        return named(b"READY", metadata(self._socket_type))

    def handshake(self, body: bytes) -> tuple[bytes, bytes | None]:
        ready = named(b"READY")
        if not body.startswith(ready):
            raise ProtocolError("not the command READY")
        return b"", body[len(ready) :]

    def open(self, frame: Frame) -> Frame:
        return frame

    def seal(self, frame: Frame) -> Frame:
        return frame


class Peer:
    """What one peer has sent, and the answers of the protocol itself (`outgoing`)."""

    def __init__(self, mechanism: Mechanism, socket_types: Sequence[bytes]) -> None:
        """`socket_types`: those of peers that may connect."""
        self.outgoing = bytearray()
        """Bytes to send. The caller removes them."""
        self.is_ready = False
        """Whether the handshake has ended."""
        self._mechanism = mechanism
        self._socket_types = socket_types
        self._received = bytearray()
        self._has_greeting = False
        self._message: list[bytes] = []

    def receive(self, data: bytes) -> Iterator[list[bytes]]:
        """Yields each message: frames; for SUBSCRIBE and CANCEL one frame, as in ZMTP 3.0.

        Raises ProtocolError.
        """
        self._received += data
        if not self._has_greeting and not self._read_greeting():
            return
        while (frame := self._next_frame()) is not None:
            if not self.is_ready:
                self._shake_hands(frame)
                continue
            frame = self._mechanism.open(frame)
            if frame.is_command:
                yield from self._command(frame.body)
                continue
            self._message.append(frame.body)
            if len(self._message) > _MAX_MESSAGE_FRAMES:
                raise ProtocolError("a message has too many frames")
            if not frame.has_more:
                message, self._message = self._message, []
                yield message

    def seal(self, frames: Sequence[Frame]) -> bytes:
        """Returns the bytes of frames for this peer."""
        return b"".join(wire_of(self._mechanism.seal(frame)) for frame in frames)

    def _read_greeting(self) -> bool:
        received = self._received
        expected = _SIGNATURE[:1]
        if received[: len(expected)] != expected or (len(received) > 9 and not received[9] & 1):
            raise ProtocolError("not the greeting of ZMTP 3")
        if len(received) > len(_SIGNATURE) and received[len(_SIGNATURE)] < _VERSION[0]:
            raise ProtocolError("the peer speaks an older version of ZMTP")
        if len(received) < _GREETING_BYTES:
            return False
        name = self._mechanism.name
        if received[12:32].rstrip(b"\0") != name:
            raise ProtocolError("another security mechanism")
        del received[:_GREETING_BYTES]
        self._has_greeting = True
        if body := self._mechanism.begin():
            self._send_command(body)
        return True

    @staticmethod
    def greeting(mechanism: bytes, *, is_server: bool) -> bytes:
        """Returns the first bytes of a connection."""
        return _SIGNATURE + _VERSION + mechanism.ljust(20, b"\0") + bytes([is_server]) + bytes(31)

    def _next_frame(self) -> Frame | None:
        received = self._received
        if len(received) < 2:
            return None
        flags = received[0]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ProtocolError("unknown flags")
        begin = 9 if flags & _LONG else 2
        if len(received) < begin:
            return None
        end = begin + int.from_bytes(received[1:begin], "big")
        if end - begin > MAX_FRAME_BYTES:
            raise ProtocolError("a frame is too long")
        if len(received) < end:
            return None
        body = bytes(memoryview(received)[begin:end])
        del received[:end]
        return Frame(body, bool(flags & _MORE), bool(flags & _COMMAND))

    def _shake_hands(self, frame: Frame) -> None:
        if not frame.is_command:
            raise ProtocolError("a message during the handshake")
        answer, properties = self._mechanism.handshake(frame.body)
        if properties is not None:
            if _properties(properties).get(b"socket-type") not in self._socket_types:
                raise ProtocolError("a socket of this type cannot be served")
            self.is_ready = True
        if answer:
            self._send_command(answer)

    def _command(self, body: bytes) -> Iterator[list[bytes]]:
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if name == b"SUBSCRIBE":
            yield [b"\x01" + rest]
        elif name == b"CANCEL":
            yield [b"\x00" + rest]
        elif name == b"PING":
            context = rest[_PING_TTL_BYTES:]
            if len(context) > _MAX_PING_CONTEXT:
                raise ProtocolError("the context of a PING is too long")
            self.outgoing += self.seal([Frame(named(b"PONG", context), is_command=True)])

    def _send_command(self, body: bytes) -> None:
        self.outgoing += wire_of(Frame(body, is_command=True))
