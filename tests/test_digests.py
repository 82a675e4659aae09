"""Names that clients choose are not compared by short hashes: a client could find two that agree.

The test lists every hash of fewer than 16 bytes in the product. Each must have a reason for which
no client gains anything from two inputs with one hash.
"""

from __future__ import annotations

import ast

import import_graph
import pytest
from import_graph import ROOT

MIN_BYTES = 16
DAMAGE = "detects damage only"
REASONS = {
    "kvtier.client.engines.file_digests": "place of a lock; two files with one place only wait for each other",
    "kvtier.client.part_streams": DAMAGE,
    "kvtier.client.testing.fake_server": DAMAGE,
    "kvtier.cuda.host.socket_io": DAMAGE,
    "kvtier.protos.wire.part_digests": DAMAGE,
    "kvtier.protos.wire.socket_frames": DAMAGE,
    "kvtier.tiers.core.slot_records": DAMAGE,
    "kvtier.tiers.disk.format": DAMAGE,
    "kvtier.tiers.lmdb.format": DAMAGE,
    "kvtier.tiers.lmdb.index_digest": DAMAGE,
    "kvtier.tiers.remote.value_codec": DAMAGE,
    "kvtier.tiers.storage.checksum": DAMAGE,
    "kvtier.tiers.remote.encryption": "ids of random keys; the tag of GCM decides",
    "kvtier.tiers.remote.valkey_nodes": "the node of a name, as Valkey defines it",
}
MODULES = {"binascii", "hashlib", "xxhash", "zlib"}
LONG = {"sha256", "sha384", "sha512", "sha3_256", "blake2b", "file_digest", "xxh3_128", "xxh3_128_digest", "xxh128"}
SIZES = {"TENANT_TAG_BYTES": 16, "NAMESPACE_BYTES - TENANT_TAG_BYTES": 16, "_TAG_BYTES": 16}
WORDS = {*MODULES, "digest", "hash"}
"""A module without any of these words has no hash."""
NO_HASH = {"Error", "a2b_hex", "b2a_base64", "compress", "decompress", "hexlify", "unhexlify"}


def short_hashes(source: str) -> list[str]:
    """Returns the expressions of a module that compute a hash of fewer than 16 bytes."""
    if not any(word in source for word in WORDS):
        return []
    nodes = list(ast.walk(ast.parse(source)))
    functions = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
        if alias.name not in NO_HASH
    }
    return [ast.unparse(node) for node in nodes if _is_short(node, functions)]


def _is_short(node: ast.AST, functions: set[str]) -> bool:
    match node:
        case ast.Call(ast.Name(name)) if name == "hash" or name in functions:
            return True
        case ast.Call(ast.Attribute(ast.Name(module), name), _, keywords) if module in MODULES and name not in NO_HASH:
            sizes = [each.value for each in keywords if each.arg == "digest_size"]
            return name not in LONG or any(_number(size) < MIN_BYTES for size in sizes)
        case ast.Subscript(value, ast.Slice(lower, upper, None)):
            name = _hash_method(value)
            stop = 1 << 30 if upper is None else _number(upper)
            return bool(name) and (lower is not None or stop < MIN_BYTES * (2 if name == "hexdigest" else 1))
    return False


def _hash_method(node: ast.AST) -> str:
    match node:
        case ast.Call(ast.Attribute(_, ("digest" | "hexdigest") as name)):
            return name
    return ""


def _number(node: ast.AST) -> int:
    return node.value if isinstance(node, ast.Constant) else SIZES.get(ast.unparse(node), 0)


def test_every_short_hash_has_a_reason() -> None:
    """A new one needs 16 bytes, or a reason here."""
    found = {
        name: hashes
        for name, module in import_graph.read_modules(ROOT).items()
        if not name.startswith(import_graph.GENERATED) and (hashes := short_hashes(module.source))
    }
    assert {name: hashes for name, hashes in found.items() if name not in REASONS} == {}
    assert set(REASONS) <= set(found), "these modules have no short hash any more"


@pytest.mark.parametrize(
    "line",
    [
        "tag = hashlib.blake2b(tenant.encode(), digest_size=4).digest()",
        "tag = hashlib.blake2b(tenant.encode(), digest_size=SIZE).digest()",
        "tag = hashlib.sha256(tenant.encode()).digest()[:8]",
        "tag = hashlib.sha256(tenant.encode()).hexdigest()[:16]",
        "tag = hashlib.sha256(tenant.encode()).digest()[-8:]",
        "tag = hashlib.md5(tenant.encode()).digest()",
        "tag = xxhash.xxh3_64_intdigest(tenant)",
        "from zlib import crc32\ntag = crc32(tenant)",
        "tag = hash(tenant)",
    ],
)
def test_a_planted_short_hash_is_found(line: str) -> None:
    assert short_hashes(line)


@pytest.mark.parametrize(
    "line",
    [
        "tag = hashlib.blake2b(tenant.encode(), digest_size=16).digest()",
        "tag = hashlib.sha256(tenant.encode()).hexdigest()[:32]",
        "tag = hashlib.sha256(tenant.encode()).digest()",
    ],
)
def test_a_long_hash_needs_no_reason(line: str) -> None:
    assert not short_hashes(line)
