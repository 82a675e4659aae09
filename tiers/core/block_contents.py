"""Table of the tokens of blocks, as engines described them: bounded, in memory only.

Readers of events that find blocks by tokens need them. No decision of the core depends on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from ..secondary_tier import NamespaceId
from ..types import TENANT_TAG_BYTES

__all__ = ["BlockContent", "BlockContents"]

_ENTRY_BYTES = 340
"""Memory of an entry with keys of 36 bytes, without its tokens: 300 to 340 bytes, measured."""
_KEY_BYTES = 36
_TRIM, _TRIM_PART = 64, 256
"""At the limit, a namespace loses its 64 oldest entries, or 1 in 256 if these are more.

A dict scans the places of all entries that it has lost since its last growth to find its oldest
entry. With 64 entries per scan and 670,000 entries, one `put` took 9 to 16 µs instead of 2."""
_FREED_PER_CALL = 4096
"""Freeing a million entries at once would stop the event loop for 0.1 s."""


BlockContent: TypeAlias = tuple[bytes | None, bytes, str]
"""Key of the block before (None for the first one of a prompt), token ids (little-endian uint32
each), and name of the LoRA adapter."""


class _Namespace:
    __slots__ = ("entries", "nbytes")

    def __init__(self) -> None:
        self.entries: dict[bytes, BlockContent] = {}
        self.nbytes = 0


class BlockContents:
    """Contents per namespace and key.

    At the limit, the largest namespace of the tenant with the most contents loses its oldest ones.
    So a tenant with many namespaces does not displace the contents of another tenant.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        """`limit_bytes`: limit of the memory; 0 keeps nothing."""
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._namespaces: dict[NamespaceId, _Namespace] = {}
        self._tenants: Counter[bytes] = Counter()
        """Bytes of each tenant."""
        self._dropped: list[dict[bytes, BlockContent]] = []
        """Entries of removed namespaces, whose memory is freed in slices."""

    def __len__(self) -> int:
        return sum(len(namespace.entries) for namespace in self._namespaces.values())

    def __bool__(self) -> bool:
        return bool(self._namespaces)

    def get(self, namespace: NamespaceId, key: bytes) -> BlockContent | None:
        known = self._namespaces.get(namespace)
        return known.entries.get(key) if known is not None else None

    def put(self, namespace: NamespaceId, key: bytes, content: BlockContent) -> None:
        """Adds an entry; does nothing if the key has one."""
        if not self.limit_bytes:
            return
        known = self._namespaces.get(namespace)
        if known is None:
            known = self._namespaces[namespace] = _Namespace()
        if key in known.entries:
            return
        known.entries[key] = content
        self._count(namespace, known, _size_of(key, content))
        if self.nbytes > self.limit_bytes:
            self._trim()
        self._free()

    def drop(self, namespace: NamespaceId, key: bytes) -> None:
        known = self._namespaces.get(namespace)
        if known is not None and key in known.entries:
            self._remove(namespace, known, key)

    def drop_all(self, namespace: NamespaceId) -> None:
        known = self._namespaces.pop(namespace, None)
        if known is not None:
            self._count(namespace, known, -known.nbytes)
            self._dropped.append(known.entries)

    def tick(self) -> None:
        self._free()

    def _trim(self) -> None:
        tenant = max(self._tenants, key=self._tenants.__getitem__)
        namespace, known = max(
            ((name, each) for name, each in self._namespaces.items() if name.startswith(tenant)),
            key=lambda item: item[1].nbytes,
        )
        for key in list(_first(known.entries, max(_TRIM, len(known.entries) // _TRIM_PART))):
            self._remove(namespace, known, key)

    def _remove(self, namespace: NamespaceId, known: _Namespace, key: bytes) -> None:
        self._count(namespace, known, -_size_of(key, known.entries.pop(key)))
        if not known.entries:
            del self._namespaces[namespace]

    def _count(self, namespace: NamespaceId, known: _Namespace, nbytes: int) -> None:
        known.nbytes += nbytes
        self.nbytes += nbytes
        tenant = namespace[:TENANT_TAG_BYTES]
        self._tenants[tenant] += nbytes
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def _free(self) -> None:
        if self._dropped:
            entries = self._dropped[-1]
            for _ in range(min(_FREED_PER_CALL, len(entries))):
                entries.popitem()
            if not entries:
                self._dropped.pop()


def _size_of(key: bytes, content: BlockContent) -> int:
    parent, tokens, lora_name = content
    longer_keys = max(0, len(key) - _KEY_BYTES) + max(0, len(parent or b"") - _KEY_BYTES)
    return _ENTRY_BYTES + longer_keys + len(tokens) + len(lora_name.encode())


def _first(entries: dict[bytes, BlockContent], count: int) -> Iterator[bytes]:
    return (key for key, _ in zip(entries, range(count), strict=False))
