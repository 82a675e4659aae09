"""Encrypted values of blocks in a remote store: format 4, AES-256-GCM with a key per tenant.

| bytes | meaning |
|---|---|
| 4 | magic number with the format |
| 4 | number of parts |
| 8 | id of the key |
| 12 | nonce, random |
| rest | the encrypted parts |
| 16 | authentication tag |

All numbers are little-endian. The tag covers the header, namespace, key of the block, sizes of the
parts, and their bytes. So a value under another name is refused, and the value needs no checksum.

An index of a pack (`pack_format`) has the same fields, with another magic number, 0 parts and the
encrypted entries. Its tag covers the header, the path of the pack, and the entries. So only a
server with the key can write a pack, and no pack can have the name of another one. The magic
numbers keep the tags of values and indexes apart.

The id of a key is a hash of the key. If two servers have different keys, their ids differ: a server
without the right key cannot take the value of another server for a damaged one.

The package `cryptography` is the optional extra `kvtier[encryption]`. This module imports it when a
tier is opened.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from ..secondary_tier import BlockBytes, NamespaceId, Outcome, TierError, TierOpenError
from ..types import TENANT_TAG_BYTES

__all__ = ["KEY_BYTES", "EncryptedValues", "KeyRing"]

KEY_BYTES = 32
_MAGIC = b"kvt\x04"
_INDEX_MAGIC = b"kvp\x04"
_HEADER = struct.Struct("<4sI8s12s")
_KEY_ID_BYTES = 8
_NONCE_BYTES = 12
_TAG_BYTES = 16
_LOGGED_IDS = 100
"""Limit of the unknown key ids that are logged: a hostile store can invent them."""

_log = logging.getLogger(__name__)


def _key_id(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=_KEY_ID_BYTES, person=b"kvtier.kv-key").digest()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Keys of all tenants. The first key of a tenant encrypts; all keys of a tenant decrypt.

    Attributes:
        tenants: keys by tenant tag.
        others: keys of all tenants that are not in `tenants`.
    """

    tenants: Mapping[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    others: tuple[bytes, ...] = ()

    def keys_of(self, namespace: NamespaceId) -> tuple[bytes, ...]:
        return self.tenants.get(namespace[:TENANT_TAG_BYTES], self.others)


class EncryptedValues:
    """`ValueCodec` that encrypts. A namespace whose tenant has no key cannot be stored."""

    FORMAT: int = 4
    INDEX_SEAL_BYTES: int = _HEADER.size + _TAG_BYTES

    def __init__(self, keys: Callable[[], KeyRing]) -> None:
        """Calls `keys` for each block, on any thread.

        Raises `TierOpenError` if the package is not installed.
        """
        self._keys = keys
        self._ciphers, self._wrong_tag = _import_ciphers()
        self._unknown_ids: set[bytes] = set()
        self._lock = threading.Lock()

    def can_store(self, namespace: NamespaceId) -> bool:
        return bool(self._keys().keys_of(namespace))

    def known_keys(self) -> KeyRing:
        return self._keys()

    def value_bytes(self, block: BlockBytes) -> int:
        return _HEADER.size + block.nbytes + _TAG_BYTES

    def encode(self, block: BlockBytes) -> list[bytes | memoryview]:
        key = self._first_key(block.namespace)
        [value] = self.pieces_of(block)
        nonce = os.urandom(_NONCE_BYTES)
        _HEADER.pack_into(value, 0, _MAGIC, len(block.parts), _key_id(key), nonce)
        cipher = self._ciphers.Cipher(self._ciphers.algorithms.AES(key), self._ciphers.modes.GCM(nonce))
        encryptor = cipher.encryptor()
        encryptor.authenticate_additional_data(_bound_data(value, block))
        at = _HEADER.size
        for part in block.parts:
            if part.nbytes:
                at += encryptor.update_into(part, value[at:])  # releases the GIL
        encryptor.finalize()
        value[at:] = encryptor.tag
        return [value]

    def pieces_of(self, block: BlockBytes) -> list[memoryview]:
        return [memoryview(bytearray(self.value_bytes(block)))]

    def decode(self, pieces: Sequence[memoryview], nbytes: int, block: BlockBytes) -> Outcome:
        value = pieces[0][:nbytes]
        if value.nbytes < _HEADER.size:
            return Outcome.CORRUPT
        magic, count, key_id, nonce = _HEADER.unpack_from(value)
        if magic != _MAGIC:
            return Outcome.CORRUPT
        key = self._key_with(key_id, block.namespace)
        if key is None:
            return Outcome.MISSING
        if count != len(block.parts) or value.nbytes != self.value_bytes(block):
            return Outcome.CORRUPT
        tag = bytes(value[-_TAG_BYTES:])
        cipher = self._ciphers.Cipher(self._ciphers.algorithms.AES(key), self._ciphers.modes.GCM(nonce, tag))
        decryptor = cipher.decryptor()
        decryptor.authenticate_additional_data(_bound_data(value, block))
        at = _HEADER.size
        for part in block.parts:
            if part.nbytes:
                decryptor.update_into(value[at : at + part.nbytes], part)
                at += part.nbytes
        try:
            decryptor.finalize()
        except self._wrong_tag:
            return Outcome.CORRUPT
        return Outcome.DONE

    def seal_index(self, namespace: NamespaceId, path: str, entries: bytes) -> bytes:
        key, nonce = self._first_key(namespace), os.urandom(_NONCE_BYTES)
        header = _HEADER.pack(_INDEX_MAGIC, 0, _key_id(key), nonce)
        encryptor = self._ciphers.Cipher(self._ciphers.algorithms.AES(key), self._ciphers.modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(header + path.encode())
        return b"".join((header, encryptor.update(entries), encryptor.finalize(), encryptor.tag))

    def open_index(self, namespace: NamespaceId, path: str, index: bytes) -> bytes | None:
        if len(index) < self.INDEX_SEAL_BYTES:
            raise ValueError("its index is too short")
        magic, count, key_id, nonce = _HEADER.unpack_from(index)
        if (magic, count) != (_INDEX_MAGIC, 0):
            raise ValueError("its index is not an encrypted index")
        key = self._key_with(key_id, namespace)
        if key is None:
            return None
        mode = self._ciphers.modes.GCM(nonce, index[-_TAG_BYTES:])
        decryptor = self._ciphers.Cipher(self._ciphers.algorithms.AES(key), mode).decryptor()
        decryptor.authenticate_additional_data(index[: _HEADER.size] + path.encode())
        entries: bytes = decryptor.update(index[_HEADER.size : -_TAG_BYTES])
        try:
            decryptor.finalize()
        except self._wrong_tag:
            raise ValueError("its index was not written under this name by a server with the key") from None
        return entries

    def _first_key(self, namespace: NamespaceId) -> bytes:
        """Returns the key that encrypts. Raises `TierError` without one."""
        keys = self._keys().keys_of(namespace)
        if not keys:
            raise TierError("the key file has no key for this tenant")
        return keys[0]

    def _key_with(self, key_id: bytes, namespace: NamespaceId) -> bytes | None:
        """Returns the tenant's key with this id. Logs an unknown id."""
        key = next((key for key in self._keys().keys_of(namespace) if _key_id(key) == key_id), None)
        if key is None:
            self._report_unknown(key_id)
        return key

    def _report_unknown(self, key_id: bytes) -> None:
        with self._lock:
            is_new = key_id not in self._unknown_ids and len(self._unknown_ids) < _LOGGED_IDS
            if is_new:
                self._unknown_ids.add(key_id)
        if is_new:
            _log.warning("values with the unknown key id %s are misses: compare the key files", key_id.hex())


def _bound_data(value: memoryview, block: BlockBytes) -> bytes:
    """Returns the additional data that the tag covers. Only its last field has no fixed size."""
    sizes = struct.pack(f"<{len(block.parts)}Q", *(part.nbytes for part in block.parts))
    return b"".join((value[: _HEADER.size], block.namespace, sizes, block.key))


def _import_ciphers() -> tuple[ModuleType, type[Exception]]:
    """Returns the module with the ciphers and its error for a wrong tag. Raises TierOpenError."""
    try:
        ciphers = importlib.import_module("cryptography.hazmat.primitives.ciphers")
        exceptions = importlib.import_module("cryptography.exceptions")
    except ImportError as error:
        raise TierOpenError(f"needs the package cryptography: pip install 'kvtier[encryption]' ({error})") from error
    return ciphers, exceptions.InvalidTag
