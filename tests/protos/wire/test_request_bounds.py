"""Bounds of requests: every list, text and byte string has one, checked before decoding."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from harness.payloads import namespace_of
from harness.raw import RawSession, RawSocket, hello_of, refusal_of
from harness.server_process import ServerProcess

from kvtier.client.session import withdrawals
from kvtier.protos.v1 import (
    admin_pb2,
    bounds_pb2,
    cache_pb2,
    common_pb2,
    conversation_pb2,
    devices_pb2,
    events_pb2,
    handoff_pb2,
    session_pb2,
    transfer_pb2,
)
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.request_bounds import OutOfBounds, RequestBounds, _Shapes, bound_of, field_name
from kvtier.protos.wire.socket_frames import Purpose
from kvtier.server.config.schema import LimitConfig
from kvtier.tiers.types import MAX_GROUPS, MAX_WITHDRAWN

LIMITS = LimitConfig(max_keys=40, max_key_bytes=300, max_frame_bytes=4096)
"""Small limits, so that a list that is too long is made quickly. Keys may have a long length."""
SMALL, DEFAULT = RequestBounds(LIMITS), RequestBounds(LimitConfig())
MODULES = (session_pb2, cache_pb2, transfer_pb2, handoff_pb2, events_pb2, conversation_pb2, admin_pb2)
METHODS = {
    f"{service.name}/{method.name}": method.input_type
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
BOUNDS = {
    field_name(field): bound
    for module in (*MODULES, common_pb2, devices_pb2)
    for message in module.DESCRIPTOR.message_types_by_name.values()
    for field in message.fields
    if (bound := bound_of(field, LIMITS)) is not None
}
"""All options `(bound)`, with the name of the field."""
MEDIA = cache_pb2.TierFilter(media=[cache_pb2.TIER_MEDIUM_DISK] * 1000)


def fields_of(message: Descriptor) -> Iterator[FieldDescriptor]:
    for field in message.fields:
        yield field
        if field.message_type is not None:
            yield from fields_of(field.message_type)


def paths_to(name: str, message: Descriptor) -> Iterator[list[FieldDescriptor]]:
    """Yields the ways from a message to the field of this name."""
    for field in message.fields:
        if field_name(field) == name:
            yield [field]
        elif field.message_type is not None:
            yield from ([field, *rest] for rest in paths_to(name, field.message_type))


def requests_with(name: str, value: Any) -> Iterator[tuple[str, bytes]]:
    """Yields methods and serialized requests that have a value in this field."""
    for method, message in METHODS.items():
        for path in paths_to(name, message):
            yield method, serialized(path, value)


def serialized(path: list[FieldDescriptor], value: Any) -> bytes:
    """Serializes a message that has only a value at the end of a path of fields."""
    inner = message_factory.GetMessageClass(path[-1].containing_type)()
    put(inner, path[-1], value)
    data: bytes = inner.SerializeToString()
    for field in reversed(path[:-1]):
        outer = message_factory.GetMessageClass(field.containing_type)()
        part = message_factory.GetMessageClass(field.message_type).FromString(data)
        put(outer, field, [part] if field.is_repeated else part)
        data = outer.SerializeToString()
    return data


def put(message: Any, field: FieldDescriptor, value: Any) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries = value if isinstance(value, dict) else {entry.key: entry.value for entry in value}
        getattr(message, field.name).update(entries)
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    elif field.message_type is not None:
        getattr(message, field.name).MergeFrom(value)
    else:
        setattr(message, field.name, value)


def element_of(field: FieldDescriptor, size: int | None, number: int = 0) -> Any:
    """Returns an element of a list, with `size` bytes or characters if given."""
    if field.message_type is not None:
        return message_factory.GetMessageClass(field.message_type)()
    if field.type == field.TYPE_STRING:
        return "é" * (1 if size is None else size)
    return b"k" * (6 + number % 3 if size is None else size) if field.type == field.TYPE_BYTES else 1


def field_named(name: str) -> FieldDescriptor:
    return next(field for message in METHODS.values() for field in fields_of(message) if field_name(field) == name)


def refusal_of_request(method: str, message: bytes) -> OutOfBounds | None:
    try:
        SMALL.check(method, message)
    except OutOfBounds as error:
        return error
    return None


def test_bounds_are_those_of_the_core() -> None:
    """The `.proto` files cannot use the core's constants."""
    assert BOUNDS["Namespace.groups"].most == BOUNDS["ClaimHoldRequest.first_positions"].most == MAX_GROUPS
    assert BOUNDS["WithdrawGrantsRequest.grant_ids"].most == withdrawals._MAX_IDS == MAX_WITHDRAWN


def test_every_field_has_a_bound() -> None:
    """Each list, map, text and byte string of each request has the option, and no other field."""
    bounded = {
        field_name(field)
        for message in METHODS.values()
        for field in fields_of(message)
        if (field.is_repeated or field.cpp_type == field.CPPTYPE_STRING)
        and not field.containing_type.GetOptions().map_entry
    }
    # The bound of `namespace` is that of a whole message.
    assert BOUNDS.keys() - {"OpenRequest.namespace"} == bounded
    for name in bounded:
        bound, field = BOUNDS[name], field_named(name)
        option = field.GetOptions().Extensions[bounds_pb2.bound]
        assert (bound.most is not None) == field.is_repeated, name
        is_text = field.type == field.TYPE_STRING or name == "Namespace.attributes"
        assert (option.WhichOneof("element") == "max_characters") == is_text, name


@pytest.mark.parametrize("message", [session_pb2.CapabilitiesResponse, session_pb2.Devices, cache_pb2.FlushResponse])
def test_a_field_without_a_bound_is_found(message: Any) -> None:
    """The server and these tests fail at start if a list, text or byte string has no bound."""
    with pytest.raises(ValueError, match=f"{message.DESCRIPTOR.name}\\.[a-z_]+ has no bound"):
        _Shapes(LIMITS).of(message.DESCRIPTOR)


@pytest.mark.parametrize("name", [name for name, bound in BOUNDS.items() if bound.most is not None])
def test_lists_are_bounded(name: str) -> None:
    """One element more than the bound is refused, also in lists whose elements differ in length."""
    bound, field = BOUNDS[name], field_named(name)
    assert bound.most is not None
    for number, expected in ((bound.most, None), (bound.most + 1, bound.reason)):
        values: Any = [element_of(field, None, place) for place in range(number)]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values = {str(place): "" for place in range(number)}
        requests = list(requests_with(name, values))
        assert requests
        for method, message in requests:
            refusal = refusal_of_request(method, message)
            assert (refusal and refusal.reason) == expected, (method, refusal)
            assert refusal is None or (name in str(refusal) and str(bound.most) in str(refusal))


@pytest.mark.parametrize("name", [name for name, bound in BOUNDS.items() if bound.each is not None])
def test_texts_are_bounded(name: str) -> None:
    """One byte, or for texts one character, more than the bound is refused."""
    bound, field = BOUNDS[name], field_named(name)
    assert bound.each is not None
    if field.message_type is not None:
        return  # `test_a_namespace_is_bounded_as_a_whole`
    for size, expected in ((bound.each, None), (bound.each + 1, bound.reason)):
        value = element_of(field, size)
        for method, message in requests_with(name, [value] if field.is_repeated else value):
            refusal = refusal_of_request(method, message)
            assert (refusal and refusal.reason) == expected, (method, refusal)
            assert refusal is None or (name in str(refusal) and str(bound.each) in str(refusal))


def test_a_namespace_is_bounded_as_a_whole() -> None:
    namespace = common_pb2.Namespace(attributes={str(number): "x" * 8000 for number in range(8)})
    assert (
        refusal_of_request("SessionService/Open", session_pb2.OpenRequest(namespace=namespace).SerializeToString())
        is None
    )
    namespace.attributes["9"] = "x" * 8000
    refusal = refusal_of_request(
        "SessionService/Open", session_pb2.OpenRequest(namespace=namespace).SerializeToString()
    )
    assert refusal.reason == "INVALID_NAMESPACE"


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"\x42\x00" * 2, id="a message twice"),
        pytest.param(b"\x48\x01" * 2, id="a number twice"),
        pytest.param(b"\xf8\x07\x00" * 1366, id="many unknown fields"),
        pytest.param(b"\xfa\x07\x88\x27" + bytes(5000), id="large unknown field"),
        pytest.param(b"\xfb\x07\xfc\x07", id="group"),
        pytest.param(b"\x1a\x80\x80\x80\x80\x80\x00", id="length of six bytes"),
        pytest.param(b"\x1a\x05key", id="cut off"),
        pytest.param(b"\x42\x03\x0a\x02a", id="cut off inside"),
        pytest.param(b"\x42\x02\x0a\x02ab", id="longer than its message"),
        pytest.param(b"\x1a", id="only a tag"),
        pytest.param(b"\x09\x00", id="short number"),
    ],
)
def test_odd_messages_are_refused(message: bytes) -> None:
    """The bounds hold for messages that no encoder writes."""
    refusal = refusal_of_request("CacheService/Lookup", message)
    assert refusal.reason == "INVALID_ARGUMENT"


def test_valid_messages_pass() -> None:
    """Messages within the bounds pass in every form that encoders write."""
    ref = common_pb2.SessionRef(session_id=b"s" * 16, epoch=2**64 - 1)
    lookup = cache_pb2.LookupRequest(
        session=ref, keys=pack_keys([b"k" * (5 + place % 250) for place in range(40)]), min_hits=2**31
    )
    unpacked = b"".join(b"\x10\x02" for _ in range(16))
    data = lookup.SerializeToString() + b"\x42" + bytes([len(unpacked)]) + unpacked + b"\xf8\x07\x01"
    assert list(cache_pb2.LookupRequest.FromString(data).exclude.media) == [2] * 16
    assert refusal_of_request("CacheService/Lookup", data) is None
    assert refusal_of_request("CacheService/Lookup", b"") is None
    with pytest.raises(DecodeError):
        cache_pb2.LookupRequest.FromString(b"\x1a\x05key")


def test_largest_requests_of_methods() -> None:
    """Only calls with long lists may have large requests."""
    large = {method for method in METHODS if DEFAULT.size_refusal(method, 64 << 10) is None}
    small = {"Capabilities", "CompleteLoad", "FinishRequest", "Reset", "Locate", "UnregisterDeviceBuffers"}
    small |= {"GetStatus", "ListLeases", "ListHandoffs", "ExplainRequest", "Drain"}
    assert {method.split("/")[1] for method in METHODS.keys() - large} >= small


@pytest.mark.parametrize("method", METHODS)
def test_large_requests_are_refused_before_they_are_read(method: str) -> None:
    """The reason is that of the method's largest fields, if the first 64 fields are in bounds."""
    keyed = {"Lookup", "BeginRequest", "Prefetch", "PrepareStore", "Flush", "PublishHold", "DescribeBlocks"}
    reasons = dict.fromkeys((*keyed, "ActOnConversation"), "TOO_MANY_KEYS")
    reasons |= {"Push": "WRONG_SIZE", "Open": "INVALID_NAMESPACE"}
    size = next(2**power for power in range(30) if DEFAULT.size_refusal(method, 2**power))
    with pytest.raises(OutOfBounds, match=f"{size} bytes; the limit is") as refused:
        DEFAULT.check(method, b"\xf8\x07\x00" * (size // 3) + b"\x00" * (size % 3))
    assert refused.value.reason == reasons.get(method.split("/")[1], "INVALID_ARGUMENT")
    with pytest.raises(OutOfBounds):
        DEFAULT.check(method, b"\xff" * size)
    if session := METHODS[method].fields_by_name.get("session"):
        large = serialized([session, session.message_type.fields_by_name["session_id"]], bytes(size))
        with pytest.raises(OutOfBounds, match=r"SessionRef\.session_id") as refused:
            DEFAULT.check(method, large)
        assert refused.value.reason == "UNKNOWN_SESSION"


def test_requests_have_few_fields() -> None:
    """The fields of all messages of a request count together, with elements and unknown fields."""
    holds = [handoff_pb2.HoldRef(engine_id="e", request_id="r")] * 1024
    data = handoff_pb2.RenewHoldsRequest(session=common_pb2.SessionRef(epoch=1), holds=holds).SerializeToString()
    assert refusal_of_request("HandoffService/RenewHolds", data) is None
    with_unknown = handoff_pb2.HoldRef.FromString(b"\x50\x00" * 10)
    data = handoff_pb2.RenewHoldsRequest(holds=[with_unknown] * 1024).SerializeToString()
    refusal = refusal_of_request("HandoffService/RenewHolds", data)
    assert refusal.reason == "INVALID_ARGUMENT"
    assert "8192 fields" in str(refusal)
    packed = handoff_pb2.PublishHoldRequest(positions=range(65536)).SerializeToString()
    DEFAULT.check("HandoffService/PublishHold", packed)
    with pytest.raises(OutOfBounds, match="8192 fields"):  # as a list that is not packed
        DEFAULT.check("HandoffService/PublishHold", b"\x28\x01" * 65536)


def test_refusals_name_field_and_bound(tmp_path_factory: pytest.TempPathFactory) -> None:
    """GRPC and sockets refuse the same request with the same reason; the session goes on."""
    namespace = namespace_of(4096)
    with (
        ServerProcess(tmp_path_factory.mktemp("bounds")) as server,
        RawSession(server.start().endpoint, namespace, engine_id="e") as session,
        RawSocket(session.capabilities.region.attach_path, hello_of(session.ref, Purpose.CALLS)) as connection,
    ):
        assert connection.answer()[0] == 0
        request = cache_pb2.LookupRequest(session=session.ref, exclude=MEDIA)
        with pytest.raises(grpc.RpcError) as refused:
            session.cache.Lookup(request, timeout=60)
        assert refusal_of(refused.value) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
        assert re.search(r"TierFilter\.media.* 16 ", refused.value.details())
        connection.send_call("CacheService/Lookup", request)
        assert connection.refusal() == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
        large = cache_pb2.CompleteLoadRequest(session=common_pb2.SessionRef(session_id=bytes(1 << 20)))
        connection.send_call("CacheService/CompleteLoad", large)
        assert connection.refusal() == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
        code, _ = connection.call(
            "CacheService/Lookup", cache_pb2.LookupRequest(session=session.ref, keys=pack_keys([b"k" * 36]))
        )
        assert code in (0, grpc.StatusCode.INVALID_ARGUMENT.value[0])
