"""Contract of every client, for any transport: tested with the real server and with the fake."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.client import (
    DurableStatus,
    Group,
    HandoffDirection,
    HoldGone,
    HoldName,
    InvalidRequest,
    KeyStatus,
    LeaseLost,
    Namespace,
    NotOwner,
    PublishStatus,
    StoreStatus,
    make_hold_key,
    make_key,
)

SMALL, LARGE = 5000, 3 << 20
NAMESPACE = Namespace("contract", "uint8", (Group(SMALL, 16), Group(LARGE, 16)))


def new_keys(count: int, group: int = 0) -> list[bytes]:
    """Returns keys that no test has used before."""
    return [make_key(os.urandom(32), group) for _ in range(count)]


class CacheClientContract:
    """Subclasses provide the fixture `connect`: (namespace, engine_id=, rank=) -> client."""

    @pytest.fixture
    def client(self, connect: Callable[..., Any]) -> Any:
        return connect(NAMESPACE)

    @pytest.mark.parametrize(("group", "size", "count"), [(0, SMALL, 1), (0, SMALL, 300), (1, LARGE, 5)])
    def test_stored_blocks_are_loaded(self, client: Any, group: int, size: int, count: int) -> None:
        """Blocks come back bit by bit, in buffers of several kinds."""
        keys = new_keys(count, group)
        data = [os.urandom(size) for _ in keys]
        assert set(client.store(keys, data)) == {StoreStatus.GRANTED}
        buffers = [bytearray(size) for _ in keys]
        assert client.load(keys, [memoryview(buffer) for buffer in buffers]) == count
        assert [bytes(buffer) for buffer in buffers] == data

    def test_a_store_may_mix_groups(self, client: Any) -> None:
        """A load may, too."""
        keys = [key for pair in zip(new_keys(3), new_keys(3, 1), strict=True) for key in pair]
        data = [os.urandom(size) for size in (SMALL, LARGE) * 3]
        client.store(keys, data)
        buffers = [bytearray(len(block)) for block in data]
        assert client.load(keys, buffers) == 6
        assert [bytes(buffer) for buffer in buffers] == data

    def test_only_the_unbroken_prefix_is_loaded(self, client: Any) -> None:
        """Buffers behind the first miss are not written."""
        keys = new_keys(4)
        data = [os.urandom(SMALL) for _ in keys]
        client.store([keys[0], keys[1], keys[3]], [data[0], data[1], data[3]])
        buffers = [bytearray(SMALL) for _ in keys]
        assert client.load(keys, buffers) == 2
        assert [bytes(buffer) for buffer in buffers] == [data[0], data[1], bytes(SMALL), bytes(SMALL)]

    def test_lookup_modes(self, client: Any) -> None:
        """With PREFIX a key behind a miss is a miss; with EACH it is a hit."""
        keys = new_keys(3)
        client.store(keys[::2], [bytes(SMALL)] * 2)
        hit, miss = KeyStatus.HIT, KeyStatus.MISS
        with client.lookup(keys) as lease:
            assert (lease.statuses, lease.prefix_hits) == (bytes([hit, miss, miss]), 1)
            assert lease.sources[0] == "cpu"
        with client.lookup(keys, prefix=False) as lease:
            assert (lease.statuses, lease.prefix_hits) == (bytes([hit, miss, hit]), 1)

    def test_unknown_keys_are_misses(self, client: Any) -> None:
        """They get no lease; an empty list of keys is valid."""
        assert client.lookup(new_keys(3)).id == 0
        empty = client.lookup([])
        assert (empty.id, empty.statuses, empty.prefix_hits) == (0, b"", 0)
        assert client.store([], []) == b""
        assert client.load([], []) == 0

    def test_a_present_block_is_not_written_again(self, client: Any) -> None:
        """B1.5: its status is PRESENT, and it keeps its first bytes."""
        keys = new_keys(2)
        client.store(keys[:1], [b"1" * SMALL])
        assert client.store(keys, [b"2" * SMALL] * 2) == bytes([StoreStatus.PRESENT, StoreStatus.GRANTED])
        buffer = bytearray(SMALL)
        assert client.load(keys[:1], [buffer]) == 1
        assert buffer == b"1" * SMALL

    def test_retention_can_be_set_per_request_or_per_call(self, client: Any) -> None:
        """Blocks beyond the limits are counted; here there are none."""
        keys = new_keys(2)
        client.begin_request("r", retain_for=60)
        assert set(client.store(keys, [b"1" * SMALL] * 2, request_id="r", retain_for=30)) == {StoreStatus.GRANTED}
        with client.write(keys, retain_for=30) as batch:
            assert (batch.wanted, batch.not_retained) == ([], 0)
        with client.lookup(keys, retain_for=30) as lease:
            assert (lease.prefix_hits, lease.not_retained) == (2, 0)
        client.finish_request("r")

    def test_a_prefetch_counts_the_leading_blocks(self, client: Any) -> None:
        """Blocks in the CPU tier are present. The first missing key ends the prefetch."""
        keys = new_keys(4)
        stored = [*keys[:2], keys[3]]
        client.store(stored, [os.urandom(SMALL) for _ in stored])
        found = client.prefetch(keys, retain_for=60.0)
        assert (found.present, found.started, found.missing, found.no_room) == (2, 0, 2, 0)
        with client.lookup(keys) as lease:
            assert lease.prefix_hits == 2

    def test_a_block_that_is_being_written_is_not_visible(self, client: Any) -> None:
        """B4.5: until then a block is no hit, and other clients may not write it."""
        keys = new_keys(1)
        with client.write(keys) as batch:
            assert batch.wanted == [0]
            assert client.lookup(keys).statuses != bytes([KeyStatus.HIT])
            assert client.store(keys, [bytes(SMALL)]) == bytes([StoreStatus.IN_PROGRESS])
            batch.views()[0][:] = b"w" * SMALL
        buffer = bytearray(SMALL)
        assert client.load(keys, [buffer]) == 1
        assert buffer == b"w" * SMALL

    def test_views_of_a_batch_may_be_released_early(self, client: Any) -> None:
        """A view is an ordinary context manager.

        The memory stays mapped, and others can write to it later.
        """
        for _ in range(2):
            keys = new_keys(2)
            with client.write(keys) as batch, batch.memory as memory:
                for offset in batch.offsets:
                    memory[offset : offset + SMALL] = b"x" * SMALL
            with client.lookup(keys) as lease, client.read(lease, [0, 1]) as read, read.memory as memory:
                assert [bytes(memory[offset : offset + SMALL]) for offset in read.offsets] == [b"x" * SMALL] * 2

    def test_a_repeated_key_is_written_once(self, client: Any) -> None:
        """The repetition is IN_PROGRESS."""
        (key,) = new_keys(1)
        statuses = client.store([key, key], [b"a" * SMALL, b"b" * SMALL])
        assert statuses == bytes([StoreStatus.GRANTED, StoreStatus.IN_PROGRESS])

    def test_an_exception_aborts_a_store(self, client: Any) -> None:
        """None of its blocks becomes visible, and the next store is granted."""
        keys = new_keys(2)
        with pytest.raises(ZeroDivisionError), client.write(keys):
            raise ZeroDivisionError
        assert client.lookup(keys).id == 0
        assert set(client.store(keys, [bytes(SMALL)] * 2)) == {StoreStatus.GRANTED}

    def test_items_that_failed_are_left_out(self, client: Any) -> None:
        """The other blocks of the store are published."""
        keys = new_keys(3)
        with client.write(keys) as batch:
            batch.failed.add(1)
        hit, miss = KeyStatus.HIT, KeyStatus.MISS
        with client.lookup(keys, prefix=False) as lease:
            assert lease.statuses == bytes([hit, miss, hit])

    def test_reading_items_of_a_lease(self, client: Any) -> None:
        """In any order and repeatedly, until the lease is released."""
        keys = new_keys(4)
        data = [os.urandom(SMALL) for _ in keys]
        client.store(keys, data)
        lease = client.lookup(keys)
        for items in ([3, 0], [1], []):
            with client.read(lease, items) as batch:
                assert [bytes(view) for view in batch.views()] == [data[item] for item in items]
        with client.read(lease.id, [2]) as batch:
            assert bytes(batch.views()[0]) == data[2]
        lease.release()
        with pytest.raises(LeaseLost), client.read(lease.id, [2]):
            pass

    def test_a_read_fails_if_its_lease_ends(self, client: Any) -> None:
        """Leaving the `with` block raises, because the copied bytes may be wrong."""
        keys = new_keys(1)
        client.store(keys, [bytes(SMALL)])
        lease = client.lookup(keys)
        with pytest.raises(LeaseLost), client.read(lease, [0]):
            lease.release()

    def test_only_hits_can_be_read(self, client: Any) -> None:
        """A miss of the lease and an unknown item are refused; the lease stays."""
        keys = new_keys(2)
        client.store(keys[:1], [bytes(SMALL)])
        with client.lookup(keys) as lease:
            for item in (1, 2, -1):
                for named in (lease, lease.id):
                    with pytest.raises(InvalidRequest), client.read(named, [item]):
                        pass
            with client.read(lease, [0]) as batch:
                assert bytes(batch.views()[0]) == bytes(SMALL)

    def test_finishing_a_request_releases_its_leases(self, client: Any) -> None:
        """Leases of other requests stay."""
        keys = new_keys(1)
        client.store(keys, [bytes(SMALL)])
        mine = client.begin_request("mine", keys, kv_transfer_params={"tag": 1})
        other = client.lookup(keys, request_id="other")
        assert mine.policy is not None
        assert client.touch(mine.id, other.id) == []
        client.finish_request("mine")
        client.finish_request("never begun")
        assert client.touch(mine.id, other.id) == [mine.id]
        other.release()

    def test_leases_and_stores_belong_to_their_engine(self, connect: Callable[..., Any]) -> None:
        """Other engines get NOT_OWNER and have no effect.

        Another client of the same engine may use them.
        """
        owner = connect(NAMESPACE, engine_id="owner")
        friend = connect(NAMESPACE, engine_id="owner")
        stranger = connect(NAMESPACE, engine_id="stranger")
        keys = new_keys(1)
        owner.store(keys, [b"x" * SMALL])
        with owner.lookup(keys) as lease:
            with pytest.raises(NotOwner), stranger.read(lease.id, [0]):
                pass
            with pytest.raises(NotOwner):
                stranger.release(lease.id)
            with friend.read(lease.id, [0]) as batch:
                assert bytes(batch.views()[0]) == b"x" * SMALL

    def test_ids_of_other_tenants_do_not_exist(self, connect: Callable[..., Any]) -> None:
        """They are answered like unknown ids. In another namespace of the tenant: NOT_OWNER."""
        owner = connect(NAMESPACE, engine_id="owner")
        tenant = connect(dataclasses.replace(NAMESPACE, tenant="another"), engine_id="owner")
        namespace = connect(dataclasses.replace(NAMESPACE, dtype="float16"), engine_id="owner")
        keys = new_keys(1)
        owner.store(keys, [b"x" * SMALL])
        with owner.lookup(keys) as lease:
            for lease_id in (lease.id, lease.id + 1):
                with pytest.raises(LeaseLost), tenant.read(lease_id, [0]):
                    pass
                tenant.release(lease_id)
                assert tenant.touch(lease_id) == [lease_id]
            with pytest.raises(NotOwner), namespace.read(lease.id, [0]):
                pass
            with pytest.raises(NotOwner):
                namespace.touch(lease.id)
            with owner.read(lease.id, [0]) as batch:
                assert bytes(batch.views()[0]) == b"x" * SMALL

    def test_namespaces_are_separate(self, connect: Callable[..., Any]) -> None:
        """A client with another dtype or layout finds nothing under the same key."""
        keys = new_keys(1)
        connect(NAMESPACE).store(keys, [bytes(SMALL)])
        for other in (
            Namespace("contract", "float16", NAMESPACE.groups),
            Namespace("contract", "uint8", NAMESPACE.groups, layout="transposed"),
            Namespace("contract", "uint8", NAMESPACE.groups, tenant="another"),
            Namespace("contract", "uint8", NAMESPACE.groups, attributes={"rope": "yarn"}),
            Namespace("contract", "uint8", (Group(SMALL, 32), NAMESPACE.groups[1])),
        ):
            assert connect(other).lookup(keys).id == 0

    def test_a_block_is_visible_when_every_rank_has_stored_its_part(self, connect: Callable[..., Any]) -> None:
        """B3.14: each rank reads its own part; a missing part makes the block a miss."""
        world = Namespace("ranks", "uint8", (Group(SMALL, 16),), world_size=2)
        ranks = [connect(world, engine_id="tp", rank=rank) for rank in range(2)]
        keys = new_keys(2)
        ranks[0].store(keys, [b"0" * SMALL] * 2)
        assert ranks[1].lookup(keys).id == 0
        ranks[1].store(keys[:1], [b"1" * SMALL])
        with ranks[0].lookup(keys) as lease:
            assert lease.prefix_hits == 1
            for rank in (0, 1):
                with ranks[rank].read(lease.id, [0]) as batch:
                    assert bytes(batch.views()[0]) == b"%d" % rank * SMALL

    def test_workers_read_what_a_scheduler_has_looked_up(self, connect: Callable[..., Any]) -> None:
        """Each rank reads its own part, with the slots of the lookup or without them."""
        world = Namespace("ranks", "uint8", (Group(SMALL, 16),), world_size=2)
        scheduler = connect(world, engine_id="tp")
        ranks = [connect(world, engine_id="tp", rank=rank) for rank in range(2)]
        keys = new_keys(3)
        for number, rank in enumerate(ranks):
            rank.store(keys[:2], [b"%d" % number * SMALL] * 2)
        for lease in (scheduler.begin_request("r", keys, slots=True), scheduler.lookup(keys, slots=True)):
            for number, rank in enumerate(ranks):
                for slots in (lease.slots, None):
                    with rank.read(lease.id, [1], slots=slots) as batch:
                        assert bytes(batch.views()[0]) == b"%d" % number * SMALL
            lease.release()
            with pytest.raises(LeaseLost), ranks[0].read(lease.id, [1], slots=lease.slots):
                pass
        scheduler.finish_request("r")

    def test_flush_reports_durable_blocks(self, client: Any) -> None:
        """Stored blocks become durable; unknown ones do not."""
        keys = new_keys(3)
        client.store(keys[:2], [os.urandom(SMALL) for _ in range(2)])
        durable, volatile = DurableStatus.DURABLE, DurableStatus.VOLATILE
        assert client.flush(keys, wait=30) == bytes([durable, durable, volatile])

    def test_invalid_input_is_refused(self, client: Any) -> None:
        """Nothing is stored then."""
        (key,) = new_keys(1)
        for keys, buffers in (
            ([key], []),
            ([key], [bytes(SMALL - 1)]),
            ([key], [bytes(SMALL + 1)]),
            ([b"key"], [bytes(SMALL)]),
            ([make_key(b"x" * 32, 2)], [bytes(SMALL)]),
            ([key], [memoryview(bytes(2 * SMALL))[::2]]),
            ([key], ["text"]),
        ):
            with pytest.raises(InvalidRequest):
                client.store(keys, buffers)
        with pytest.raises(InvalidRequest):
            client.load([key], [bytes(SMALL)])
        with pytest.raises(InvalidRequest):
            client.lookup([b"key"])
        assert client.lookup([key]).id == 0

    def test_a_request_can_be_handed_over(self, connect: Callable[..., Any]) -> None:
        """B2.17: one engine publishes.

        Another claims, reads with an ordinary lease, and releases.
        """
        prefill, decode = connect(NAMESPACE, engine_id="prefill"), connect(NAMESPACE, engine_id="decode")
        keys = [*new_keys(2), *new_keys(1, 1), make_hold_key("prefill", "r", 1, 1)]
        data = [os.urandom(SMALL if key[-1] == 0 else LARGE) for key in keys]
        prefill.store(keys, data)
        published = prefill.publish("r", keys, [0, 1, 0, 1], num_tokens=30, hold_for=60)
        assert (published.status, published.pending_blocks) == (PublishStatus.PUBLISHED, 0)
        assert 30 < published.remaining <= 60
        hold = HoldName("prefill", "r")
        with decode.claim(hold, request_id="mine", wait=30, first_positions=[1]) as claim:
            assert claim.statuses == bytes([0, *[KeyStatus.HIT] * 3])
            assert (list(claim.hold.positions), claim.hold.num_tokens) == ([0, 1, 0, 1], 30)
            assert claim.hold.direction is HandoffDirection.PREFILL_TO_DECODE
            assert list(claim.keys) == keys
            with decode.read(claim, [1, 3]) as batch:
                assert [bytes(view) for view in batch.views()] == [data[1], data[3]]
        decode.release_holds(hold, HoldName("unknown", "r"))
        with pytest.raises(HoldGone) as gone:
            decode.claim(hold)
        assert gone.value.reason == "HOLD_NOT_FOUND"
        with decode.lookup(keys, prefix=False) as lease:
            assert lease.statuses == bytes([*[KeyStatus.HIT] * 3, KeyStatus.MISS]), (
                "the last block belonged to the hold"
            )

    def test_a_reader_of_a_hold_may_finish(self, connect: Callable[..., Any]) -> None:
        """B2.6 B2.17: the hold may end during the read.

        Blocks that only it named end with the lease.
        """
        prefill, decode = connect(NAMESPACE, engine_id="prefill"), connect(NAMESPACE, engine_id="decode")
        hold = HoldName("prefill", "again")
        for replace in (False, True):
            keys = [*new_keys(1), make_hold_key("prefill", "again", 0, 1, os.urandom(8))]
            data = [os.urandom(SMALL) for _ in keys]
            prefill.store(keys, data)
            prefill.publish("again", keys, [0, 1], num_tokens=20)
            with decode.claim(hold) as claim:
                if replace:
                    prefill.publish("again", keys[:1], [0], num_tokens=16)
                else:
                    decode.release_holds(hold)
                with decode.read(claim, [0, 1]) as batch:
                    assert [bytes(view) for view in batch.views()] == data
            with decode.lookup(keys, prefix=False) as lease:
                assert lease.statuses == bytes([KeyStatus.HIT, KeyStatus.MISS])
        decode.release_holds(hold)

    def test_a_hold_waits_for_its_blocks(self, connect: Callable[..., Any]) -> None:
        """Blocks being stored are PENDING, and misses once their engine has ended.

        Stored ones stay.
        """
        prefill, decode = connect(NAMESPACE, engine_id="prefill"), connect(NAMESPACE, engine_id="decode")
        keys, hold = new_keys(2), HoldName("prefill", "early")
        published = prefill.publish("early", keys, [0, 1], num_tokens=32, direction=HandoffDirection.DECODE_TO_PREFILL)
        assert published.pending_blocks == 2
        prefill.store(keys[:1], [bytes(SMALL)])
        with decode.claim(hold, wait=0.05) as claim:
            assert claim.statuses == bytes([KeyStatus.HIT, KeyStatus.HIT_PENDING])
            assert claim.hold.direction is HandoffDirection.DECODE_TO_PREFILL
        with decode.claim(hold, wait=30, min_blocks=1) as claim:
            assert (claim.hold.settled_blocks, claim.statuses[0]) == (1, KeyStatus.HIT), "it does not wait for both"
        prefill.close()
        with decode.claim(hold, wait=30, min_blocks=2) as claim:
            assert claim.statuses == bytes([KeyStatus.HIT, KeyStatus.MISS])
            assert claim.hold.settled_blocks == 2
        decode.release_holds(hold)

    def test_a_heartbeat_reports_ended_holds(self, client: Any) -> None:
        """B2.1: one call renews many holds; an empty list is valid."""
        client.publish("here", new_keys(1), [0], num_tokens=16)
        here, gone = HoldName(client.engine_id, "here"), HoldName(client.engine_id, "gone")
        assert client.renew_holds(here, gone, extension=20) == [gone]
        assert client.renew_holds() == []
        client.release_holds(here)
        assert client.renew_holds(here) == [here]

    def test_a_hold_needs_a_name_and_a_position_per_block(self, client: Any) -> None:
        for request_id, keys, positions in (("", new_keys(1), [0]), ("r", new_keys(1), []), ("r", [b"key"], [0])):
            with pytest.raises(InvalidRequest):
                client.publish(request_id, keys, positions, num_tokens=16)
        with pytest.raises(InvalidRequest):
            client.claim(HoldName("", "r"))
        with pytest.raises(InvalidRequest):
            client.release_holds(HoldName("e", ""))
        with pytest.raises(HoldGone):
            client.claim(HoldName(client.engine_id, "r"))

    def test_holds_of_two_namespaces_are_separate(self, connect: Callable[..., Any]) -> None:
        """Also with the same name."""
        keys = new_keys(1)
        here, there = connect(NAMESPACE, engine_id="e"), connect(Namespace("other", "uint8", NAMESPACE.groups))
        here.publish("r", keys, [0], num_tokens=16)
        with pytest.raises(HoldGone):
            there.claim(HoldName("e", "r"))
        assert there.renew_holds(HoldName("e", "r")) == [HoldName("e", "r")]
        there.release_holds(HoldName("e", "r"))
        assert here.renew_holds(HoldName("e", "r")) == []
        here.release_holds(HoldName("e", "r"))
