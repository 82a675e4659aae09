"""Messages between the server and its bulk process: msgpack, sent as payloads of `child`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..config.schema import LimitConfig

__all__ = [
    "Accepted",
    "Begin",
    "Caller",
    "Committed",
    "Damaged",
    "Detached",
    "End",
    "FromChild",
    "Granted",
    "Handshake",
    "Listening",
    "Moved",
    "Ping",
    "Pong",
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
    """First message of the server."""

    region_bytes: int
    limits: LimitConfig
    tls: tuple[str, str, str] | None = None
    """Files of certificate, key and client CA ("" for none); TCP connections use TLS if set."""


class Granted(_Message, frozen=True):
    """Grants slots to a stream. `sizes` are the bytes of the part in each slot.

    `received`: start and end of each range of bytes that a store has received already.
    """

    stream: int
    slots: list[int]
    sizes: list[int]
    received: list[int] = []


class Refusal(_Message, frozen=True):
    """Ends a stream, before or after its slots were granted. The child answers with `Detached`."""

    stream: int
    reason: str
    text: str


class Accepted(_Message, frozen=True):
    """Positive answer to a `Handshake`."""

    stream: int
    tenant: str
    """Tenant of the session; tenants share the connections."""


class Committed(_Message, frozen=True):
    """Answer to an `End` with `complete`."""

    stream: int
    completed: bool


class Ping(_Message, frozen=True):
    """Asks whether the child still reads messages. The answer is `Pong`."""


class Pong(_Message, frozen=True):
    """Answer to a `Ping`."""


class Listening(_Message, frozen=True):
    """First message of the child: it serves connections from now on."""


class Caller(msgspec.Struct, frozen=True, array_like=True):
    """Session that a connection belongs to, and the credentials of its client."""

    session_id: bytes
    epoch: int
    token: str | None
    names: list[str]
    """Names in the client's certificate."""
    is_local: bool
    """Whether the client came over a Unix socket."""


class Handshake(_Message, frozen=True):
    """Asks whether a new connection is accepted. The answer is Accepted or Refusal."""

    stream: int
    caller: Caller


class Begin(_Message, frozen=True):
    """Asks to write to a store, or to read items of a lease."""

    stream: int
    caller: Caller
    push: bool
    target: int
    items: list[int]


class Moved(_Message, frozen=True):
    """Progress since the last report: transferred bytes, and the ranges of them for a Push.

    `ranges`: start and end of each verified range that the slots of the store contain.
    """

    stream: int
    nbytes: int
    ranges: list[int] = []


class Damaged(_Message, frozen=True):
    """Reports a frame whose checksum does not match."""

    stream: int


class Detached(_Message, frozen=True):
    """Reports that a refused stream no longer accesses the region, and its last progress."""

    stream: int
    nbytes: int = 0
    ranges: list[int] = []


class End(_Message, frozen=True):
    """Reports the end and the last progress of a stream, which no longer accesses the region.

    `complete` asks the server to complete the store or the load.
    """

    stream: int
    code: str
    complete: bool = False
    nbytes: int = 0
    ranges: list[int] = []


ToChild: TypeAlias = Setup | Granted | Refusal | Accepted | Committed | Ping
FromChild: TypeAlias = Listening | Pong | Handshake | Begin | Moved | Damaged | Detached | End

_encoder = msgspec.msgpack.Encoder()
_to_child = msgspec.msgpack.Decoder(ToChild)
_from_child = msgspec.msgpack.Decoder(FromChild)


def encode(message: ToChild | FromChild) -> bytes:
    return _encoder.encode(message)


def decode_to_child(data: bytes) -> ToChild:
    """Raises `msgspec.DecodeError` or `msgspec.ValidationError`."""
    message: ToChild = _to_child.decode(data)
    return message


def decode_from_child(data: bytes) -> FromChild:
    """Raises the same errors as `decode_to_child`."""
    message: FromChild = _from_child.decode(data)
    return message
