"""What the server and its bulk process say to each other: msgpack, as payload of the messages of `child`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "Begin",
    "Committed",
    "Damaged",
    "Detached",
    "End",
    "FromChild",
    "Granted",
    "Listening",
    "Moved",
    "Refusal",
    "Setup",
    "ToChild",
    "decode_from_child",
    "decode_to_child",
    "encode",
]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Setup(_Message, frozen=True):
    """The first word of the server: where to listen, and what the region is."""

    region_bytes: int
    hosts: tuple[str, ...]
    """Hosts to listen on, all at one port."""
    port: int
    """The port for gRPC to try first; 0 for any."""
    any_port: bool
    """Whether another will do."""
    plain: bool
    """Whether to serve plain sockets."""
    plain_port: int
    """The port for those, likewise."""
    any_plain_port: bool
    paths: tuple[str, ...]
    """Unix sockets to listen on."""
    max_frame_bytes: int
    max_message_bytes: int
    tls: tuple[str, str, str] | None = None
    """Files of the certificate, its key, and who vouches for clients ("" for none is needed): TCP is TLS then, and not plain."""


class Granted(_Message, frozen=True):
    """A stream may go on: these are its slots, and the bytes of the part in each."""

    stream: int
    slots: list[int]
    sizes: list[int]


class Refusal(_Message, frozen=True):
    """A stream must end, now or when it was going to begin. The child answers with `Detached`."""

    stream: int
    reason: str
    text: str


class Committed(_Message, frozen=True):
    """The answer to an `End`."""

    stream: int
    completed: bool


class Listening(_Message, frozen=True):
    """The first word of the child: it serves, on these ports (0: on none)."""

    port: int
    """For gRPC."""
    plain_port: int
    """For plain sockets."""


class Begin(_Message, frozen=True):
    """A stream wants to write to a store, or to read items of a lease."""

    stream: int
    push: bool
    session_id: bytes
    epoch: int
    target: int
    transport: str
    """Whose bytes it moves, for metrics."""
    items: list[int] = []
    token: str | None = None
    """What the client has shown with its call; nothing on a plain socket, where the session's id is all there is."""
    names: list[str] = []
    """Of its certificate."""
    is_local: bool = True
    """Whether it came by a Unix socket."""


class Moved(_Message, frozen=True):
    """A stream has moved so many bytes since it last said so; a push has no gap from `start` to `end`."""

    stream: int
    nbytes: int
    start: int = 0
    end: int = 0


class Damaged(_Message, frozen=True):
    """A frame of a stream was not what its checksum says."""

    stream: int


class Detached(_Message, frozen=True):
    """A stream that was refused touches the region no more."""

    stream: int


class End(_Message, frozen=True):
    """A stream has ended and touches the region no more. `complete` asks for the store or the load to be completed.

    What it has moved since it last said so comes with it, as `Moved` has it.
    """

    stream: int
    code: str
    complete: bool = False
    nbytes: int = 0
    start: int = 0
    end: int = 0


ToChild: TypeAlias = Setup | Granted | Refusal | Committed
FromChild: TypeAlias = Listening | Begin | Moved | Damaged | Detached | End

_encoder = msgspec.msgpack.Encoder()
_to_child = msgspec.msgpack.Decoder(ToChild)
_from_child = msgspec.msgpack.Decoder(FromChild)


def encode(message: ToChild | FromChild) -> bytes:
    """Returns a message as it is sent."""
    return _encoder.encode(message)


def decode_to_child(data: bytes) -> ToChild:
    """Reads what the server has said. Raises `msgspec.DecodeError` or `msgspec.ValidationError`."""
    message: ToChild = _to_child.decode(data)
    return message


def decode_from_child(data: bytes) -> FromChild:
    """Reads what the child has said. Raises as `decode_to_child`."""
    message: FromChild = _from_child.decode(data)
    return message
