"""Bounds of all lists, texts and byte strings in requests: one table, checked before decoding.

The decoder creates an object for each element, and handlers loop over the elements. A request of
16 MiB can have 8 million elements, so that its decoding alone would stop the event loop for most
of a second. `RequestBounds` therefore counts the elements in the serialized request and refuses the
request at the first field that exceeds its bound. The cost of the check is limited by the bounds:
about 0.3 µs per element, and less for keys of equal length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NoReturn, Protocol, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from ..v1 import admin_pb2, cache_pb2, conversation_pb2, events_pb2, handoff_pb2, session_pb2, transfer_pb2

__all__ = ["Bound", "Limits", "OutOfBounds", "RequestBounds", "field_name", "table_of"]

T = TypeVar("T")

_PACKAGE = "kvtier.v1."
_SERVICES = [
    service
    for module in (session_pb2, cache_pb2, transfer_pb2, handoff_pb2, events_pb2, conversation_pb2, admin_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
_OTHER_BYTES = 64 << 10
"""Bound of requests to services that are not kvtier's: health and reflection."""
_UNKNOWN_FIELDS, _UNKNOWN_BYTES = 256, 4096
"""Bounds of the fields of a message that a newer client may send."""
_REPETITIONS = 16
"""How often a field that is not a list may occur. Encoders write it once; decoders merge it."""
_TEXT, _NAME = 512, 4096
_MAX_TIERS = 64
_MAX_GROUPS = 256
_MAX_WITHDRAWN = 256
_MAX_MEDIA = 16
_MAX_ATTRIBUTES = 1024
_MAX_NAMESPACE_BYTES = 64 << 10
_MAX_PARAMS_BYTES = 16 << 10
_MAX_TOKEN_BYTES = 4 << 20
"""A million token ids per call: 65,536 blocks of 16 tokens."""
_MAX_HOLDS = 4096
_MAX_ALLOCATIONS = 4096
_MAX_DEVICE_GROUPS, _MAX_RUNS = 64, 512
_VARINT_BYTES, _CHARACTER_BYTES, _LENGTH_BYTES = 10, 4, 2
_NO_TERMINATORS = bytes(range(128, 256))
_EQUAL, _MAX_STEP = 16, 4096
"""How many equal lengths in a row suggest that more follow, and how many are compared at once."""
_FIXED_BYTES = {1: 8, 5: 4}
_VARINT, _DELIMITED = 0, 2


class OutOfBounds(Exception):
    """A request exceeds a bound or is malformed; `reason` is a name of `ErrorReason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Limits(Protocol):
    """Limits of a server that `table_of` needs."""

    @property
    def max_keys(self) -> int: ...
    @property
    def max_key_bytes(self) -> int: ...
    @property
    def max_frame_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Bound:
    """Bound of a field.

    Attributes:
        each: characters of a text, bytes of a byte string or message; in a list those of each
            element. None for a number, and for a message that has only the bounds of its fields.
        most: number of elements of a list or map; None for other fields.
        reason: error reason of a request with more elements.
        reason_each: error reason of a request with a larger element.
    """

    each: int | None = None
    most: int | None = None
    reason: str = "INVALID_ARGUMENT"
    reason_each: str = "INVALID_ARGUMENT"


def table_of(limits: Limits) -> dict[str, Bound]:
    """Returns the bounds of all requests, by message and field."""
    text, name, numbers = Bound(_TEXT), Bound(_NAME, reason_each="INVALID_NAMESPACE"), Bound(most=limits.max_keys)
    return {
        "SessionRef.session_id": Bound(64, reason_each="UNKNOWN_SESSION"),
        "PackedKeys.keys": Bound(limits.max_keys * limits.max_key_bytes, reason_each="TOO_MANY_KEYS"),
        "PackedKeys.lengths": Bound(limits.max_keys * _LENGTH_BYTES, reason_each="TOO_MANY_KEYS"),
        "OpenRequest.client_name": text,
        "OpenRequest.engine_id": text,
        "OpenRequest.transport": text,
        "OpenRequest.engine_address": text,
        "OpenRequest.served_model": text,
        "OpenRequest.namespace": Bound(_MAX_NAMESPACE_BYTES, reason_each="INVALID_NAMESPACE"),
        **{f"Namespace.{field}": name for field in ("model", "revision", "dtype", "layout", "hash_scheme", "tenant")},
        "Namespace.groups": Bound(most=_MAX_GROUPS, reason="INVALID_NAMESPACE"),
        "Namespace.attributes": Bound(most=_MAX_ATTRIBUTES, reason="INVALID_NAMESPACE"),
        "Namespace.AttributesEntry.key": name,
        "Namespace.AttributesEntry.value": Bound(_MAX_NAMESPACE_BYTES, reason_each="INVALID_NAMESPACE"),
        "Group.name": name,
        "BeginRequestRequest.request_id": text,
        "BeginRequestRequest.source": text,
        "BeginRequestRequest.conversation_id": text,
        "BeginRequestRequest.kv_transfer_params_json": Bound(_MAX_PARAMS_BYTES),
        "TierFilter.names": Bound(_TEXT, _MAX_TIERS),
        "TierFilter.media": Bound(most=_MAX_MEDIA),
        "LookupRequest.request_id": text,
        "LookupRequest.source": text,
        "PrefetchRequest.request_id": text,
        "PrefetchRequest.source": text,
        "PrepareLoadRequest.items": numbers,
        "ReleaseLeaseRequest.lease_ids": numbers,
        "WithdrawGrantsRequest.grant_ids": Bound(most=_MAX_WITHDRAWN),
        "TouchRequest.lease_ids": numbers,
        "PrepareStoreRequest.request_id": text,
        "CompleteStoreRequest.failed_items": numbers,
        "BlockContents.token_ids": Bound(_MAX_TOKEN_BYTES),
        "BlockContents.lora_name": text,
        "FinishRequestRequest.request_id": text,
        "PushRequest.payload": Bound(limits.max_frame_bytes, reason_each="WRONG_SIZE"),
        "PullRequest.items": numbers,
        "RegisterDeviceBuffersRequest.device_uuid": text,
        "RegisterDeviceBuffersRequest.allocations": Bound(most=_MAX_ALLOCATIONS),
        "RegisterDeviceBuffersRequest.groups": Bound(most=_MAX_DEVICE_GROUPS),
        "RegisterDeviceBuffersRequest.event_handles": Bound(_TEXT, _MAX_ALLOCATIONS),
        "ProcessOrigin.boot_id": text,
        "DeviceAllocation.handle": Bound(_TEXT),
        "DeviceGroup.runs": Bound(most=_MAX_RUNS),
        "StoreFromDeviceRequest.blocks": numbers,
        "StoreFromDeviceRequest.items": numbers,
        "LoadToDeviceRequest.blocks": numbers,
        "LoadToDeviceRequest.items": numbers,
        "PublishHoldRequest.request_id": text,
        "PublishHoldRequest.positions": numbers,
        "HoldRef.engine_id": text,
        "HoldRef.request_id": text,
        "ClaimHoldRequest.request_id": text,
        "ClaimHoldRequest.first_positions": Bound(most=_MAX_GROUPS),
        "RenewHoldsRequest.holds": Bound(most=_MAX_HOLDS),
        "ReleaseHoldsRequest.holds": Bound(most=_MAX_HOLDS),
        "ReportNotClaimedRequest.request_id": text,
        "ActOnConversationRequest.namespace_id": Bound(64),
        "ActOnConversationRequest.tenant": Bound(_NAME),
        "ActOnConversationRequest.conversation_id": text,
        "ActOnConversationRequest.last_key": Bound(limits.max_key_bytes, reason_each="INVALID_KEY"),
        "ListConversationsRequest.tenant": Bound(_NAME),
        "ListConversationsRequest.conversation_id": text,
        "FsckRequest.tiers": Bound(_TEXT, _MAX_TIERS),
        "EvictRequest.tiers": Bound(_TEXT, _MAX_TIERS),
        "EvictRequest.tenant": Bound(_NAME),
        "EvictRequest.namespace_id": Bound(64),
        "ExplainRequestRequest.request_id": text,
        "ExplainRequestRequest.engine_id": text,
    }


class RequestBounds:
    """Checks serialized requests against the table. Any thread may use it."""

    def __init__(self, limits: Limits) -> None:
        """Raises KeyError if the table lacks a field of a request."""
        shapes = _Shapes(table_of(limits))
        self._shapes = {
            f"{service.name}/{method.name}": shapes.of(method.input_type)
            for service in _SERVICES
            for method in service.methods
        }

    def max_bytes(self, method: str) -> int:
        """Returns the size of the largest request within the bounds. `method`: Service/Method."""
        shape = self._shapes.get(method)
        return _OTHER_BYTES if shape is None else shape.max_bytes

    def check(self, method: str, message: bytes) -> None:
        """Checks a request of a method (Service/Method). Raises `OutOfBounds`."""
        shape = self._shapes.get(method)
        if shape is not None:
            shape.check(message)
        elif len(message) > _OTHER_BYTES:
            raise OutOfBounds("INVALID_ARGUMENT", f"the request has {len(message)} bytes; the limit is {_OTHER_BYTES}")

    def checking(self, method: str, parse: Callable[[bytes], T]) -> Callable[[bytes], T]:
        """Returns a parser that checks a request before it parses. `method`: name as in gRPC."""
        name = method.removeprefix(f"/{_PACKAGE}")

        def check_and_parse(message: bytes) -> T:
            self.check(name, message)
            return parse(message)

        return check_and_parse


def field_name(field: FieldDescriptor) -> str:
    """Returns the name of a field in the table."""
    name: str = field.full_name
    return name.removeprefix(_PACKAGE)


class _Field:
    """Bounds of a field in the form that `_Shape.check` needs."""

    __slots__ = (
        "bound",
        "each",
        "is_fixed_number",
        "is_list",
        "is_number",
        "is_plain_list",
        "is_text",
        "most",
        "name",
        "shape",
    )

    def __init__(self, field: FieldDescriptor, bound: Bound, shape: _Shape | None) -> None:
        self.name = field_name(field)
        self.bound = bound
        self.is_list = bound.most is not None
        self.most = _REPETITIONS if bound.most is None else bound.most
        self.shape = shape
        self.is_number = shape is None and field.cpp_type not in (field.CPPTYPE_STRING, field.CPPTYPE_MESSAGE)
        self.is_fixed_number = self.is_number and field.type not in (
            *(field.TYPE_INT32, field.TYPE_INT64, field.TYPE_UINT32, field.TYPE_UINT64),
            *(field.TYPE_SINT32, field.TYPE_SINT64, field.TYPE_BOOL, field.TYPE_ENUM),
        )
        self.each = bound.each
        self.is_text = field.type == field.TYPE_STRING
        self.is_plain_list = self.is_list and shape is None and not self.is_number

    @property
    def max_bytes(self) -> int:
        """Largest size of the field, with tags and lengths, as encoders write it."""
        if self.each is not None:
            element = self.each * (_CHARACTER_BYTES if self.is_text else 1)
        else:
            element = self.shape.max_bytes if self.shape is not None else _VARINT_BYTES
        return (self.most if self.is_list else 1) * (6 + element)

    def check(self, message: bytes, begin: int, end: int) -> int:
        """Checks an element or a packed list. Returns how many more elements the list has."""
        if self.each is not None and end - begin > self.each:
            self._check_size(message, begin, end)
        if self.shape is not None:
            self.shape._check(message, begin, end)  # noqa: SLF001 - `check` would copy the message
        elif self.is_number:
            return self._packed(message, begin, end) - 1
        return 0

    def _check_size(self, message: bytes, begin: int, end: int) -> None:
        if not self.is_text:
            raise OutOfBounds(self.bound.reason_each, f"{self.name}: {end - begin} bytes; the limit is {self.each}")
        most = self.each or 0
        # Decodes only if the text may fit. The parser refuses a text that is not valid.
        if end - begin > _CHARACTER_BYTES * most or len(message[begin:end].decode(errors="replace")) > most:
            raise OutOfBounds(self.bound.reason_each, f"{self.name}: more than {most} characters")

    def _packed(self, message: bytes, begin: int, end: int) -> int:
        """Returns how many numbers a packed list has."""
        if self.is_fixed_number:
            return -(-(end - begin) // 4)
        if end - begin > _VARINT_BYTES * self.most:
            self.refuse_number()
        return len(message[begin:end].translate(None, _NO_TERMINATORS))

    def refuse_number(self) -> NoReturn:
        what = "elements" if self.is_list else "occurrences"
        raise OutOfBounds(self.bound.reason, f"{self.name}: more than {self.most} {what} in one call")


class _Shape:
    """Fields of a message type, by number."""

    def __init__(self, fields: Mapping[int, _Field]) -> None:
        self._fields = fields
        self.max_bytes = _UNKNOWN_BYTES + sum(field.max_bytes for field in fields.values())

    def check(self, message: bytes) -> None:
        """Raises `OutOfBounds` if a field exceeds its bound or the message is malformed."""
        try:
            self._check(message, 0, len(message))
        except IndexError:
            raise _malformed() from None

    def _check(self, message: bytes, pos: int, end: int) -> None:
        numbers: dict[_Field, int] = {}
        unknown = unknown_bytes = 0
        while pos < end:
            start = pos
            tag, pos = _varint(message, pos) if message[pos] > 127 else (message[pos], pos + 1)
            field, kind = self._fields.get(tag >> 3), tag & 7
            count = 1
            if kind == _DELIMITED:
                length, begin = _varint(message, pos) if message[pos] > 127 else (message[pos], pos + 1)
                pos = begin + length
                if field is not None and pos <= end:
                    count += field.check(message, begin, pos)
                    if field.is_plain_list:
                        more, pos = _skip_elements(message, start, begin, pos, end, field)
                        count += more
            else:
                pos = _skip_number(kind, message, pos)
            if field is not None:
                numbers[field] = count = count + numbers.get(field, 0)
                if count > field.most:
                    field.refuse_number()
            else:
                unknown, unknown_bytes = unknown + 1, unknown_bytes + pos - start
                if unknown > _UNKNOWN_FIELDS or unknown_bytes > _UNKNOWN_BYTES:
                    _refuse_unknown()
        if pos != end:
            raise _malformed()


class _Shapes:
    """Creates the shapes of message types from the table, each once."""

    def __init__(self, table: Mapping[str, Bound]) -> None:
        self._table = table
        self.of = cache(self._of)

    def _of(self, descriptor: Descriptor) -> _Shape:
        return _Shape({field.number: self._field(field) for field in descriptor.fields})

    def _field(self, field: FieldDescriptor) -> _Field:
        is_bounded = field.is_repeated or field.cpp_type == field.CPPTYPE_STRING
        bound = self._table[field_name(field)] if is_bounded else self._table.get(field_name(field), Bound())
        return _Field(field, bound, self.of(field.message_type) if field.message_type is not None else None)


def _varint(message: bytes, pos: int, most: int = 5) -> tuple[int, int]:
    """Returns a number of at most `most` bytes, and the position behind it."""
    byte = message[pos]
    if byte < 128:
        return byte, pos + 1
    value = 0
    for place in range(most):
        byte = message[pos + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, pos + place + 1
    raise _malformed()


def _skip_number(kind: int, message: bytes, pos: int) -> int:
    """Returns the position behind a number. Refuses other kinds, which no encoder writes."""
    if kind == _VARINT:
        return _varint(message, pos, _VARINT_BYTES)[1]
    if kind not in _FIXED_BYTES:
        raise _malformed()
    return pos + _FIXED_BYTES[kind]


def _skip_elements(message: bytes, start: int, begin: int, pos: int, end: int, field: _Field) -> tuple[int, int]:
    """Skips short texts or byte strings of the same list behind an element.

    `start` is the position of the element's tag, `begin` that of its bytes, `pos` its end. Returns
    how many elements follow, and the position behind them. Stops at an element that is too long, or
    if there are too many, or behind a long one: the caller checks the remaining elements.
    """
    found = 0
    if begin - start != 2:  # tag or length have more than one byte
        return found, pos
    tag, length, equal = message[start], message[start + 1], 0
    each, limit = min(field.each or 0, 127), end - 1
    while pos < limit and found <= field.most:
        nbytes = message[pos + 1]
        if message[pos] != tag or nbytes > each or pos + 2 + nbytes > end:
            break
        pos += 2 + nbytes
        found += 1
        equal = equal + 1 if nbytes == length else 0
        length = nbytes
        if equal >= _EQUAL:
            same = _count_same(message[pos - 2 - length : pos - length], message, pos, end)
            equal, found, pos = 0, found + same, pos + same * (2 + length)
    return found, pos


def _count_same(head: bytes, message: bytes, pos: int, end: int) -> int:
    """Returns how many elements with this tag and length follow. Compares many heads at once."""
    stride, found, step = 2 + head[1], 0, _EQUAL
    while pos + step * stride <= end:
        stop = pos + step * stride
        if message[pos:stop:stride] != head[:1] * step or message[pos + 1 : stop : stride] != head[1:] * step:
            break
        found, pos = found + step, stop
        step = min(4 * step, _MAX_STEP)
    return found


def _malformed() -> OutOfBounds:
    return OutOfBounds("INVALID_ARGUMENT", "the message cannot be parsed: it is cut off or malformed")


def _refuse_unknown() -> NoReturn:
    most = f"{_UNKNOWN_FIELDS} unknown fields or {_UNKNOWN_BYTES} bytes in them"
    raise OutOfBounds("INVALID_ARGUMENT", f"the message has more than {most}")
