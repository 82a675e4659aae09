"""Server's end of CurveZMQ: authenticates readers by their public keys, and encrypts what they get.

The specification is https://rfc.zeromq.org/spec/26/. The primitives are those of libsodium, by
PyNaCl. A connection has its own keys, which exist only in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from nacl import bindings as sodium
from nacl.exceptions import CryptoError

from .zmtp import Frame, ProtocolError, metadata, named

__all__ = ["CurveMechanism"]

_KEY_BYTES: Final = 32
_SHORT_NONCE_BYTES: Final = 8
_LONG_NONCE_BYTES: Final = 16
_COOKIE_BYTES: Final = 96
_VOUCH_BYTES: Final = 96
_HELLO_BYTES: Final = 194
"""Length of HELLO after the name: version, padding, the client's short-term key, nonce and box."""
_MORE, _COMMAND = 1, 2


class CurveMechanism:
    """Security mechanism CURVE of one connection. The client must know the server's public key."""

    name = b"CURVE"

    def __init__(self, secret: bytes, socket_type: bytes, admit: Callable[[bytes], bool]) -> None:
        """`admit` is called with the client's public key and returns whether it may read."""
        self._secret = secret
        self._public = sodium.crypto_scalarmult_base(secret)
        self._socket_type = socket_type
        self._admit = admit
        self._short_public, self._short_secret = sodium.crypto_box_keypair()
        self._client = b""
        """Short-term key of the client."""
        self._cookie = b""
        self._shared = b""
        self._sent = self._received = 0
        """Last nonces of both ends."""

    def begin(self) -> bytes:
        return b""

    def handshake(self, body: bytes) -> tuple[bytes, bytes | None]:
        try:
            if not self._client:
                return self._welcome(_after(b"HELLO", body)), None
            return self._ready(_after(b"INITIATE", body))
        except (CryptoError, ValueError, TypeError) as error:
            raise ProtocolError(f"the handshake failed: {error}") from None

    def open(self, frame: Frame) -> Frame:
        sealed = _after(b"MESSAGE", frame.body)
        number = self._check_nonce(sealed[:_SHORT_NONCE_BYTES])
        try:
            body = sodium.crypto_box_open_afternm(
                sealed[_SHORT_NONCE_BYTES:], b"CurveZMQMESSAGEC" + number, self._shared
            )
        except (CryptoError, ValueError) as error:
            raise ProtocolError(f"a message is not authentic: {error}") from None
        if not body:
            raise ProtocolError("a message without flags")
        return Frame(body[1:], bool(body[0] & _MORE), bool(body[0] & _COMMAND))

    def seal(self, frame: Frame) -> Frame:
        body = bytes([_MORE * frame.has_more | _COMMAND * frame.is_command]) + frame.body
        return Frame(named(b"MESSAGE", self._box(b"CurveZMQMESSAGES", body)))

    def _welcome(self, hello: bytes) -> bytes:
        if len(hello) != _HELLO_BYTES or hello[:2] != b"\x01\x00":
            raise ProtocolError("not a HELLO of version 1.0")
        client, nonce = hello[74:106], hello[106:114]
        sodium.crypto_box_open(hello[114:], b"CurveZMQHELLO---" + nonce, client, self._secret)
        self._check_nonce(nonce)
        self._client = client
        # The connection keeps the client's key, so the cookie need not contain it, only be unique.
        self._cookie = os.urandom(_COOKIE_BYTES)
        long_nonce = os.urandom(_LONG_NONCE_BYTES)
        box = sodium.crypto_box(self._short_public + self._cookie, b"WELCOME-" + long_nonce, client, self._secret)
        return named(b"WELCOME", long_nonce + box)

    def _ready(self, initiate: bytes) -> tuple[bytes, bytes]:
        if initiate[:_COOKIE_BYTES] != self._cookie:
            raise ProtocolError("another cookie")
        begin = _COOKIE_BYTES + _SHORT_NONCE_BYTES
        nonce = self._check_nonce(initiate[_COOKIE_BYTES:begin])
        self._shared = sodium.crypto_box_beforenm(self._client, self._short_secret)
        opened = sodium.crypto_box_open_afternm(initiate[begin:], b"CurveZMQINITIATE" + nonce, self._shared)
        key, vouch = opened[:_KEY_BYTES], opened[_KEY_BYTES : _KEY_BYTES + _VOUCH_BYTES]
        if len(vouch) != _VOUCH_BYTES:
            raise ProtocolError("INITIATE is too short")
        vouched = sodium.crypto_box_open(
            vouch[_LONG_NONCE_BYTES:], b"VOUCH---" + vouch[:_LONG_NONCE_BYTES], key, self._short_secret
        )
        if vouched != self._client + self._public or not self._admit(key):
            raise ProtocolError("the client's key is not known")
        ready = named(b"READY", self._box(b"CurveZMQREADY---", metadata(self._socket_type)))
        return ready, opened[_KEY_BYTES + _VOUCH_BYTES :]

    def _box(self, prefix: bytes, body: bytes) -> bytes:
        self._sent += 1
        nonce = self._sent.to_bytes(_SHORT_NONCE_BYTES, "big")
        return nonce + sodium.crypto_box_afternm(body, prefix + nonce, self._shared)

    def _check_nonce(self, nonce: bytes) -> bytes:
        """Returns the nonce. Raises ProtocolError unless it is greater than the last one."""
        number = int.from_bytes(nonce, "big")
        if len(nonce) != _SHORT_NONCE_BYTES or number <= self._received:
            raise ProtocolError("a nonce was used before")
        self._received = number
        return nonce


def _after(name: bytes, body: bytes) -> bytes:
    """Returns a command without its name. Raises ProtocolError if it is another command."""
    if not body.startswith(named(name)):
        raise ProtocolError(f"not the command {name.decode()}")
    return body[1 + len(name) :]
