"""Encrypted values of a remote tier: format 2."""

from __future__ import annotations

import hashlib
import struct
import sys

import pytest
from contracts.shared_tier_in_memory import SharedTierInMemory, memory_tier
from contracts.tier import CORRUPT, DONE, FAILED, MISSING, SPACE, empty, fetch, full, held, key
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from harness.memory_store import MemoryStore
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.remote import value_codec
from kvtier.tiers.remote.encryption import EncryptedValues, KeyRing
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.remote_tier import UNREADABLE_SECONDS, UNREADABLE_TTL_SECONDS, RemoteTier
from kvtier.tiers.secondary_tier import BlockBytes, NamespaceId, Outcome, TierOpenError

OLD, NEW, OTHERS = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
TENANT, OTHER_TENANT = SPACE[:16], bytes(range(1, 17))
OTHER_NAMESPACE = NamespaceId(OTHER_TENANT + bytes(16))
HEADER_BYTES = 28


def codec(*keys: bytes, others: tuple[bytes, ...] = (), tenant: bytes = TENANT) -> EncryptedValues:
    ring = KeyRing({tenant: keys} if keys else {}, others)
    return EncryptedValues(lambda: ring)


def encoded(values: EncryptedValues, block: BlockBytes) -> bytearray:
    return bytearray(b"".join(values.encode(block)))


def decoded(values: EncryptedValues, value: bytes | bytearray, block: BlockBytes) -> Outcome:
    return values.decode([memoryview(value)], len(value), block)


class TestEncryptedTier(SharedTierInMemory):
    """The contract of shared tiers, with two servers that have the same keys."""

    value_format = 4

    def make_tier(self, limits: RemoteLimits) -> RemoteTier:
        return memory_tier(self.memory, limits, codec(OLD, others=(OTHERS,)))


def test_values_have_the_documented_format() -> None:
    """AES-256-GCM; the tag covers header, namespace, sizes and key of the block."""
    block = full(b"name", [b"first", b"", b"second"])
    value = bytes(encoded(codec(OLD), block))
    magic, count, key_id, nonce = struct.unpack_from("<4sI8s12s", value)
    assert (magic, count) == (b"kvt\x04", 3)
    assert key_id == hashlib.blake2b(OLD, digest_size=8, person=b"kvtier.kv-key").digest()
    bound = value[:HEADER_BYTES] + SPACE + struct.pack("<3Q", 5, 0, 6) + b"name"
    assert AESGCM(OLD).decrypt(nonce, value[HEADER_BYTES:], bound) == b"firstsecond"


@given(
    parts=st.lists(st.binary(max_size=70), min_size=1, max_size=5),
    name=st.binary(min_size=1, max_size=40),
    namespace=st.binary(min_size=16, max_size=16).map(NamespaceId),
)
def test_blocks_come_back_bit_by_bit(parts: list[bytes], name: bytes, namespace: NamespaceId) -> None:
    """With parts of any number and size; the value is unchanged by the load."""
    values = codec(OLD, others=(OTHERS,))
    value = encoded(values, full(name, parts, namespace))
    before = bytes(value)
    into = empty(name, [len(part) for part in parts], namespace)
    assert decoded(values, value, into) is DONE
    assert held(into) == tuple(parts)
    assert value == before


def test_each_changed_byte_is_detected() -> None:
    """Each bit of a value is covered by the tag, or names the key."""
    values = codec(OLD, NEW)
    good = encoded(values, full(key(1), [b"some bytes", b"more"]))
    for at in range(len(good)):
        for bit in (1, 0x80):
            value = bytearray(good)
            value[at] ^= bit
            is_key_id = 8 <= at < 16
            assert decoded(values, value, empty(key(1), (10, 4))) is (MISSING if is_key_id else CORRUPT)
    for length in range(len(good)):
        assert decoded(values, good[:length], empty(key(1), (10, 4))) is CORRUPT
    assert decoded(values, good + b"x", empty(key(1), (10, 4))) is CORRUPT
    assert decoded(values, good, empty(key(1), (10, 4))) is DONE


@pytest.mark.parametrize(
    "asked",
    [
        empty(key(2), (10, 4)),
        empty(key(1), (10, 4), NamespaceId(SPACE[:-1] + b"?")),
        empty(key(1), (4, 10)),
        empty(key(1), (14,)),
        empty(key(1), (10, 4, 0)),
        empty(key(1), (10, 5)),
        empty(key(1) + b"\0", (10, 4)),
    ],
    ids=["key", "namespace", "order of sizes", "one part", "empty part", "larger part", "longer key"],
)
def test_a_value_of_another_name_is_corrupt(asked: BlockBytes) -> None:
    """An attacker with access to the store cannot exchange values. The key is the same for all."""
    values = codec(others=(OTHERS,))
    assert decoded(values, encoded(values, full(key(1), [b"some bytes", b"more"])), asked) is CORRUPT


def test_a_value_of_another_tenant_is_a_miss() -> None:
    """Each tenant has its own keys; the key of one does not decrypt values of the other."""
    ring = KeyRing({TENANT: (OLD,), OTHER_TENANT: (NEW,)})
    values = EncryptedValues(lambda: ring)
    value = encoded(values, full(key(1), [b"secret"]))
    assert decoded(values, value, empty(key(1), (6,), OTHER_NAMESPACE)) is MISSING


def test_a_key_under_the_id_of_another_is_corrupt() -> None:
    """Only an attacker can make such a value."""
    value = encoded(codec(OLD), full(key(1), [b"secret"]))
    value[8:16] = encoded(codec(NEW), full(key(1), [b"secret"]))[8:16]
    assert decoded(codec(OLD, NEW), value, empty(key(1), (6,))) is CORRUPT


def test_nonces_are_unique() -> None:
    """The same block twice has two nonces and two ciphertexts."""
    values, block = codec(OLD), full(key(1), [bytes(64)])
    made = [bytes(encoded(values, block)) for _ in range(1000)]
    assert len({value[16:28] for value in made}) == len({value[28:] for value in made}) == 1000


def test_the_store_has_no_plain_bytes() -> None:
    """A value in the store contains neither the parts nor the block's checksum."""
    store = MemoryStore()
    assert memory_tier(store, codec=codec(OLD)).store([full(key(1), [b"the secret text of a prompt"])]) == [DONE]
    [(name, value)] = store.values.items()
    assert name.startswith(b"kvtier/4/")
    assert b"secret" not in value


def test_rotation() -> None:
    """The first key encrypts, all decrypt; a new key is first given to all servers to decrypt."""
    store = MemoryStore()
    ring = KeyRing({TENANT: (OLD,)})
    rotating, other = memory_tier(store, codec=EncryptedValues(lambda: ring)), memory_tier(store, codec=codec(OLD, NEW))
    rotating.store([full(key(1), [b"old"])])
    ring = KeyRing({TENANT: (NEW, OLD)})
    rotating.store([full(key(2), [b"new"])])
    for tier in (rotating, other):
        assert (fetch(tier, key(1), (3,)), fetch(tier, key(2), (3,))) == ((b"old",), (b"new",))
    ring = KeyRing({TENANT: (NEW,)})
    assert rotating.load([empty(key(1), (3,)), empty(key(2), (3,))]) == [MISSING, DONE]


def test_blocks_of_a_removed_key_are_stored_again() -> None:
    """Nothing asks for the old values or restarts their time to live, until they expire."""
    store = MemoryStore()
    ring = KeyRing({TENANT: (OLD,)})
    tier = memory_tier(store, codec=EncryptedValues(lambda: ring))
    tier.store([full(key(1), [b"old"])])
    ring = KeyRing({TENANT: (NEW,)})
    assert tier.load([empty(key(1), (3,))]) == [MISSING]
    [name] = store.values
    assert store.ttl_seconds[name] == UNREADABLE_TTL_SECONDS
    assert tier.lookup([(SPACE, key(1)), (SPACE, key(2))]) == [False, False]
    assert tier.store([full(key(1), [b"new"])]) == [MISSING]
    assert store.ttl_seconds[name] == UNREADABLE_TTL_SECONDS
    assert UNREADABLE_TTL_SECONDS < UNREADABLE_SECONDS
    ring = KeyRing({TENANT: (NEW, OLD)})
    assert fetch(tier, key(1), (3,)) == (b"old",), "the old key was added again"
    assert tier.lookup([(SPACE, key(1))]) == [True]
    ring = KeyRing({TENANT: (NEW,)})
    later = memory_tier(store, codec=codec(NEW))  # as after that time
    del store.values[name]
    assert later.store([full(key(1), [b"new"])]) == [DONE]
    assert fetch(later, key(1), (3,)) == (b"new",)


def test_a_value_with_an_unknown_key_stays(caplog: pytest.LogCaptureFixture) -> None:
    """It is a miss, because another server may have the key. The log names the key's id once."""
    store = MemoryStore()
    with_key, without = memory_tier(store, codec=codec(OLD)), memory_tier(store, codec=codec(NEW))
    with_key.store([full(key(1), [b"x" * 50])])
    for _ in range(3):
        into = empty(key(1), (50,))
        assert without.load([into]) == [MISSING]
        assert held(into) == (bytes(50),)
    assert fetch(with_key, key(1), (50,)) == (b"x" * 50,)
    [line] = caplog.messages
    assert hashlib.blake2b(OLD, digest_size=8, person=b"kvtier.kv-key").hexdigest() in line


def test_a_larger_value_stays_if_its_key_is_unknown() -> None:
    """It is deleted only by a server that has the key."""
    store = MemoryStore()
    with_key, without = memory_tier(store, codec=codec(OLD)), memory_tier(store, codec=codec(NEW))
    with_key.store([full(key(1), [b"x" * 50])])
    for tier, outcome, is_there in ((without, MISSING, True), (with_key, CORRUPT, False)):
        assert tier.load([empty(key(1), (49,))]) == [outcome]
        assert bool(store.values) is is_there


def test_a_tenant_without_a_key_is_not_stored() -> None:
    """Other tenants of the job are."""
    store = MemoryStore()
    tier = memory_tier(store, codec=codec(OLD))
    blocks = [full(key(1), [b"a"], OTHER_NAMESPACE), full(key(2), [b"b"])]
    assert tier.store(blocks) == [FAILED, DONE]
    assert list(store.values) == [value_codec.name_of(SPACE, key(2), EncryptedValues.FORMAT)]
    assert tier.last_error is None


def test_keys_that_vanish_during_a_store() -> None:
    """The rest of the job fails, and the tier says why."""
    rings = [KeyRing({TENANT: (OLD,)})]
    tier = memory_tier(MemoryStore(), codec=EncryptedValues(lambda: rings.pop() if rings else KeyRing()))
    assert tier.store([full(key(1), [b"a"])]) == [FAILED]
    assert "no key for this tenant" in (tier.last_error or "")


def test_plain_and_encrypted_values_do_not_meet() -> None:
    """Their names differ, so neither kind of server deletes or loads values of the other."""
    store = MemoryStore()
    plain = memory_tier(store)
    encrypted = memory_tier(store, codec=codec(OLD))
    for tier, data in ((plain, b"plain"), (encrypted, b"coded")):
        assert tier.lookup([(SPACE, key(1))]) == [False]
        assert tier.store([full(key(1), [data])]) == [DONE]
        assert fetch(tier, key(1), (5,)) == (data,)
    assert len(store.values) == 2


def test_plain_values_under_encrypted_names_are_refused() -> None:
    """An attacker without the key cannot plant a value."""
    store, block = MemoryStore(), full(key(1), [b"planted"])
    store.values[value_codec.name_of(SPACE, key(1), EncryptedValues.FORMAT)] = b"".join(value_codec.encode(block))
    assert memory_tier(store, codec=codec(OLD)).load([empty(key(1), (7,))]) == [CORRUPT]
    assert not store.values


def test_the_package_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(TierOpenError, match=r"pip install 'kvtier\[encryption\]'"):
        codec(OLD)
