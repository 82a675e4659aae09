"""From the wire's namespace to the core's."""

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
"""As a message. The server keeps some of it for as long as the session is open."""


def namespace_spec(namespace: common_pb2.Namespace) -> NamespaceSpec:
    """Returns what the core needs; the id is the tag of the tenant and a digest of every field.

    The digest is written out field by field because protobuf's own serialization is not canonical across versions, and ids
    outlive the server: they are in the keys of what the disk tiers hold.

    Raises:
        InvalidNamespace: it contradicts itself.
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
