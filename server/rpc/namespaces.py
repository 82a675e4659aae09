"""Conversion of the wire's namespace into the core's."""

from __future__ import annotations

import hashlib

from ...protos.v1 import common_pb2
from ...tiers.base import NamespaceId
from ...tiers.errors import InvalidNamespace
from ...tiers.types import TENANT_TAG_BYTES, NamespaceSpec
from ..config.tenants import tenant_tag

__all__ = ["namespace_spec"]


_FORMAT = b"kvtier.namespace.2"
_ID_BYTES = 16
_MAX_BYTES = 64 << 10
"""Maximum size of the message; the server keeps parts of it while the session is open."""


def namespace_spec(namespace: common_pb2.Namespace) -> NamespaceSpec:
    """Returns the core's namespace. Its id is the tenant's tag and a digest of every field.

    The digest does not use protobuf's serialization, which may change between versions: ids are part of
    the keys on disk. Raises `InvalidNamespace` if the fields contradict each other.
    """
    if namespace.ByteSize() > _MAX_BYTES:
        raise InvalidNamespace(f"a namespace of {namespace.ByteSize()} bytes; the limit is {_MAX_BYTES}")
    fields: list[str] = [
        namespace.model,
        namespace.revision,
        namespace.dtype,
        namespace.layout,
        namespace.hash_scheme,
        str(namespace.world_size),
        namespace.tenant,
        str(len(namespace.groups)),
    ]
    for group in namespace.groups:
        fields += [group.name, str(int(group.kind)), str(group.block_tokens), str(group.part_bytes)]
    for name, value in sorted(namespace.attributes.items()):
        fields += [name, value]
    digest = hashlib.blake2b(digest_size=_ID_BYTES - TENANT_TAG_BYTES, person=b"kvtier")
    digest.update(_FORMAT)
    for text in fields:
        raw = text.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return NamespaceSpec(
        id=NamespaceId(tenant_tag(namespace.tenant) + digest.digest()),
        world_size=namespace.world_size,
        part_bytes=tuple(group.part_bytes for group in namespace.groups),
    )
