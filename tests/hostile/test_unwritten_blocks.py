"""Stores that are completed although the server lacks bytes: no slot shows its old contents.

The victim has filled the region with its mark, so that every slot that the attacker gets contains
blocks of the victim.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash
from harness.auth_site import make_site
from harness.bulk import ROUTES, Route, data_frame, kill_bulk, locate, prepare, push_call, serving, tls_route
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.push_frames import encode_push_frame
from harness.raw import RawSession
from harness.server_process import MIB

from kvtier.client import Client, Credentials, StoreStatus
from kvtier.protos.v1 import cache_pb2, common_pb2, transfer_pb2
from kvtier.protos.wire.packed_keys import pack_keys

PART = 64 << 10
REGION = 16 * MIB
COUNT = 32
TIMEOUT = 60.0
MARK = b"\xabvictim's secret"
SALTS = itertools.count()
SERVED = ("grpc", *ROUTES)


@dataclass
class Place:
    """A server, the attacker's session in it, and its way to push."""

    name: str
    route: Route
    victim: Credentials
    session: RawSession = field(init=False)

    def fill(self) -> None:
        """Fills all slots with the mark: the blocks need twice the region."""
        namespace = namespace_of(PART, tenant="zeta", model="victim")
        secret = np.frombuffer(MARK * (PART // len(MARK)), np.uint8)
        with Client(self.route.endpoint, namespace=namespace, transport="tcp", credentials=self.victim) as client:
            salt, count = next(SALTS), REGION // PART
            for start in range(0, 2 * count, 64):
                keys = [key_of(number, salt=f"victim {salt}") for number in range(start, start + 64)]
                assert set(client.store(keys, [secret] * len(keys))) <= {StoreStatus.GRANTED, StoreStatus.NO_ROOM}

    def prepare(self, count: int = COUNT) -> tuple[int, list[bytes]]:
        keys = [key_of(number, salt=f"attack {next(SALTS)}") for number in range(count)]
        return prepare(self.session, keys), keys

    def push(self, store_id: int, *pieces: tuple[int, bytes] | tuple[int, bytes, int], complete: bool = False) -> Any:
        """Pushes frames (offset, bytes, checksum); returns the response, or None if refused."""
        if self.name == "grpc":
            messages = [
                encode_push_frame(
                    offset,
                    checksum[0] if checksum else xxhash.xxh3_64_intdigest(data),
                    [data],
                    session=None if number else self.session.ref,
                    store_id=0 if number else store_id,
                )
                for number, (offset, data, *checksum) in enumerate(pieces)
            ]
            with contextlib.suppress(grpc.RpcError):
                return self.session.push(iter(messages), timeout=TIMEOUT)
            return None
        with self.route.open(self.session) as connection:
            data = [self.frame(*piece) for piece in pieces]
            with contextlib.suppress(ConnectionError, EOFError):
                connection.send(push_call(store_id, *data, complete=complete))
                code, message = connection.answer()
                return None if code else transfer_pb2.PushResponse.FromString(message)
            return None

    def frame(self, offset: int, data: bytes, checksum: int | None = None) -> bytes:
        return data_frame(data, offset, 0 if self.name == "tls" and checksum is None else checksum)

    def cut(self, store_id: int, offset: int, data: bytes) -> None:
        """Sends half of a frame, and ends the stream."""
        if self.name == "grpc":

            def messages() -> Iterator[bytes]:
                first = b"" if offset else data[:1]
                yield encode_push_frame(
                    0, xxhash.xxh3_64_intdigest(first), [first], session=self.session.ref, store_id=store_id
                )
                raise RuntimeError("cut")

            with contextlib.suppress(grpc.RpcError):
                self.session.push(messages(), timeout=TIMEOUT)
            return
        with self.route.open(self.session) as connection:
            whole = self.frame(offset, data)
            connection.send(push_call(store_id), whole[: len(whole) - len(data) // 2])

    def complete(self, store_id: int) -> list[int]:
        request = cache_pb2.CompleteStoreRequest(session=self.session.ref, store_id=store_id)
        return list(self.session.cache.CompleteStore(request, timeout=TIMEOUT).failed_items)

    def read(self, keys: list[bytes]) -> dict[bytes, bytes]:
        """Returns the bytes of the blocks that the server offers."""
        request = cache_pb2.LookupRequest(
            session=self.session.ref, keys=pack_keys(keys), mode=cache_pb2.LOOKUP_MODE_EACH
        )
        found = self.session.cache.Lookup(request, timeout=TIMEOUT)
        items = [item for item, status in enumerate(found.statuses) if status == common_pb2.KEY_STATUS_HIT]
        if not items:
            return {}
        pull = transfer_pb2.PullRequest(session=self.session.ref, lease_id=found.lease_id, items=items)
        pulled = self.session.pull(pull, timeout=TIMEOUT)
        data = b"".join(transfer_pb2.PullResponse.FromString(each).payload for each in pulled)
        release = cache_pb2.ReleaseLeaseRequest(session=self.session.ref, lease_ids=[found.lease_id])
        self.session.cache.ReleaseLease(release, timeout=TIMEOUT)
        return {keys[item]: data[number * PART : (number + 1) * PART] for number, item in enumerate(items)}


@pytest.fixture(scope="module", params=SERVED)
def place(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("p")
    with contextlib.ExitStack() as stack:
        if request.param == "tls":
            site = make_site(directory, region=REGION, shared_memory=False)
            stack.enter_context(site.server.start())
            place = Place("tls", tls_route(site), site.credentials("zeta-engine"))
        else:
            way = "tcp" if request.param == "grpc" else request.param
            place = Place(request.param, stack.enter_context(serving(way, directory, region=REGION)), Credentials())
        namespace = namespace_of(PART, tenant="acme", model="attack")
        place.session = stack.enter_context(place.route.session(namespace, "attacker"))
        place.route.address(place.session)  # waits for the bulk process
        place.fill()
        yield place
        assert place.route.server.alive
        assert '"call failed"' not in place.route.server.log, "a defect, answered with INTERNAL"


def content(keys: list[bytes]) -> bytes:
    return b"".join(payload(key, PART).tobytes() for key in keys)


def leaked(found: dict[bytes, bytes]) -> int:
    return sum(data.count(MARK) for data in found.values())


def test_slots_contain_the_victim(place: Place) -> None:
    """The premise of this module: without it, the other tests could not fail."""
    server = place.route.server
    store_id, keys = place.prepare()
    region = server.status().tiers[0]
    assert region.used_bytes >= 0.9 * region.available_bytes
    assert place.complete(store_id) == [*range(len(keys))]


@pytest.mark.parametrize("bytes_sent", ["none", "half of each", "all but one", "the others", "short of the end"])
def test_blocks_without_all_bytes_are_not_stored(place: Place, bytes_sent: str) -> None:
    store_id, keys = place.prepare()
    data, good = content(keys), set[int]()
    pieces = []
    for number in range(len(keys)):
        start, part = number * PART, data[number * PART : (number + 1) * PART]
        match bytes_sent:
            case "half of each":
                pieces.append((start, part[: PART // 2]))
            case "all but one":
                pieces += [(start, part[: PART // 2]), (start + PART // 2 + 1, part[PART // 2 + 1 :])]
            case "the others" if number % 2:
                pieces.append((start, part))
                good.add(number)
            case "short of the end" if number < len(keys) - 1:
                pieces.append((start, part))
                good.add(number)
    if bytes_sent == "short of the end":
        pieces.append((data.__len__() - PART, data[-PART:-1]))
    if pieces:
        answer = place.push(store_id, *pieces, complete=True)
        assert not answer.completed
    failed = place.complete(store_id)
    found = place.read(keys)
    assert leaked(found) == 0
    assert failed == [number for number in range(len(keys)) if number not in good]
    assert found == {keys[number]: data[number * PART : (number + 1) * PART] for number in good}


def test_frames_in_any_order_store_the_blocks(place: Place) -> None:
    """With repeated and overlapping frames. The honest client must not lose its blocks."""
    store_id, keys = place.prepare()
    data, step = content(keys), PART // 2 + 4096
    starts = [*range(0, len(data), PART // 2)]
    pieces = [(start, data[start : start + step]) for start in (*reversed(starts), *starts[::3])]
    assert place.push(store_id, *pieces).received_bytes == sum(len(piece) for _, piece in pieces)
    assert place.complete(store_id) == []
    assert place.read(keys) == {key: data[n * PART : (n + 1) * PART] for n, key in enumerate(keys)}


def test_a_damaged_frame_stores_nothing(place: Place) -> None:
    """The bulk process writes a payload to slots before it verifies the checksum."""
    store_id, keys = place.prepare()
    data = content(keys)
    assert place.push(store_id, (0, data[: 4 * PART]), (4 * PART, data[4 * PART : 8 * PART], 1)) is None
    assert place.complete(store_id) == [*range(4, len(keys))]
    found = place.read(keys)
    assert found == {keys[number]: data[number * PART : (number + 1) * PART] for number in range(4)}


@pytest.mark.parametrize("attempt", ["damaged", "cut"])
def test_bad_frames_do_not_replace_received_bytes(place: Place, attempt: str) -> None:
    """The second stream of a store sends garbage, and is refused or ends in the middle of it."""
    store_id, keys = place.prepare()
    data, garbage = content(keys), b"\xee" * (4 * PART)
    assert place.push(store_id, (0, data)).received_bytes == len(data)
    if attempt == "cut":
        place.cut(store_id, PART, garbage)
    else:
        assert place.push(store_id, (PART, garbage, 1)) is None
    assert place.complete(store_id) == []
    assert place.read(keys) == {key: data[n * PART : (n + 1) * PART] for n, key in enumerate(keys)}


def test_a_cut_frame_stores_nothing(place: Place) -> None:
    store_id, keys = place.prepare()
    place.cut(store_id, 0, content(keys))
    assert place.complete(store_id) == [*range(len(keys))]
    assert place.read(keys) == {}


def test_a_failed_push_continues_over_grpc(place: Place) -> None:
    """The client asks how many bytes have arrived; the rest comes by another transport."""
    store_id, keys = place.prepare()
    data = content(keys)
    assert place.push(store_id, (0, data[: 5 * PART]), (5 * PART, data[5 * PART : 6 * PART], 1)) is None
    received = wait_until(lambda: locate(place.session, store_id).received_bytes)
    assert received == 5 * PART
    rest = data[received:]
    frame = encode_push_frame(
        received, xxhash.xxh3_64_intdigest(rest), [rest], session=place.session.ref, store_id=store_id
    )
    assert place.session.push(iter([frame]), timeout=TIMEOUT).received_bytes == len(rest)
    assert place.complete(store_id) == []
    assert leaked(place.read(keys)) == 0


def test_a_stream_does_not_continue_beside_a_push_over_grpc(place: Place) -> None:
    """The rest of its frame, with a wrong checksum, would overwrite the bytes of the other push."""
    if place.name == "grpc":
        pytest.skip("gRPC is the other way")
    store_id, keys = place.prepare()
    data = content(keys)
    with place.route.open(place.session) as connection:
        whole = place.frame(0, bytes(len(data)), 1)
        connection.send(push_call(store_id), whole[: len(whole) // 2])
        frame = encode_push_frame(
            0, xxhash.xxh3_64_intdigest(data), [data], session=place.session.ref, store_id=store_id
        )
        assert place.session.push(iter([frame]), timeout=TIMEOUT).received_bytes == len(data)
        with contextlib.suppress(OSError, EOFError):
            connection.send(whole[len(whole) // 2 :])
            connection.answer()
        assert place.complete(store_id) == []
    assert place.read(keys) == {key: data[n * PART : (n + 1) * PART] for n, key in enumerate(keys)}


def test_a_killed_bulk_process_stores_nothing_more(place: Place) -> None:
    """Only bytes that it had reported count: the end of the process tells nothing of the rest."""
    if place.name == "grpc":
        pytest.skip("gRPC does not use the bulk process")
    store_id, keys = place.prepare()
    data = content(keys)
    with place.route.open(place.session) as connection:
        whole = place.frame(4 * PART, data[4 * PART :])
        connection.send(push_call(store_id), place.frame(0, data[: 4 * PART]), whole[: len(whole) // 2])
        kill_bulk(place.route.server)
        assert connection.is_ended()
    failed = place.complete(store_id)
    assert failed[-len(keys) + 4 :] == [*range(4, len(keys))]
    found = place.read(keys)
    assert leaked(found) == 0
    assert all(found[key] == payload(key, PART).tobytes() for key in found)
    wait_until(lambda: locate(place.session).unix_suffix)


def test_a_long_store_in_slices_stores_nothing(place: Place) -> None:
    """PrepareStore and CompleteStore of many keys run in slices."""
    store_id, keys = place.prepare(4096)
    failed = place.complete(store_id)
    assert failed == [*range(len(failed))]
    assert failed
    assert place.read(keys) == {}


def test_another_session_of_the_engine_stores_nothing(place: Place) -> None:
    """Sessions of one engine share its stores."""
    store_id, keys = place.prepare()
    with place.route.session(place.session.namespace, "attacker") as other:
        request = cache_pb2.CompleteStoreRequest(session=other.ref, store_id=store_id)
        assert list(other.cache.CompleteStore(request, timeout=TIMEOUT).failed_items) == [*range(len(keys))]
    assert place.read(keys) == {}
