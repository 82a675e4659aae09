"""Check of serialized requests against the bounds of their fields, before decoding.

The decoder creates an object for each element, and handlers loop over the elements. A request of
16 MiB can have 8 million elements, so that its decoding alone would stop the event loop for most
of a second. The `.proto` files have the bounds: the option `(bound)` of each list, map, text and
byte string. `RequestBounds` reads them once.

A request must not have more bytes than all fields of its method at their bounds; of a larger one at
most 64 fields are read. Each field is compared with its bound. This takes about 0.4 µs per field,
and a request has at most 8,192 fields. A list of keys or numbers is one field.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, Protocol

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from ..v1 import (
    admin_pb2,
    bounds_pb2,
    cache_pb2,
    conversation_pb2,
    errors_pb2,
    events_pb2,
    handoff_pb2,
    session_pb2,
    transfer_pb2,
)

__all__ = ["Bound", "Limits", "OutOfBounds", "RequestBounds", "bound_of", "field_name"]

_PACKAGE = "kvtier.v1."
_SERVICES = [
    service
    for module in (session_pb2, cache_pb2, transfer_pb2, handoff_pb2, events_pb2, conversation_pb2, admin_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
_OTHER_BYTES = 64 << 10
"""Bound of requests to services that are not kvtier's: health and reflection."""
_MAX_FIELDS = 8192
"""Fields of a request, with those of its messages. A renewal of 1,024 holds has 3,074."""
_FIELDS_OF_LARGE = 64
"""Fields that are read of a request with too many bytes, so that its refusal can name the field."""
_UNKNOWN_BYTES = 4096
"""Bytes of the fields of a message that a newer client may send."""
_INVALID = "INVALID_ARGUMENT"
_VARINT_BYTES, _CHARACTER_BYTES, _LENGTH_BYTES = 10, 4, 2
_HEAD_BYTES = 6
"""Largest tag and length of a field, as encoders write them."""
_NO_TERMINATORS, _CONTINUATION = bytes(range(128, 256)), bytes(range(128, 192))
"""All bytes of a varint but its last; all bytes of a UTF-8 character but its first."""
_FIXED_BYTES = {1: 8, 5: 4}
_VARINT, _DELIMITED = 0, 2


class OutOfBounds(Exception):
    """A request exceeds a bound or is malformed; `reason` is a name of `ErrorReason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _TooManyFields(OutOfBounds):
    pass


class Limits(Protocol):
    """Limits of a server on which bounds depend."""

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
        reason: error reason of a request beyond the bound.
    """

    each: int | None = None
    most: int | None = None
    reason: str = _INVALID


def bound_of(field: FieldDescriptor, limits: Limits) -> Bound | None:
    """Returns the bound of a field from its option; None without the option."""
    extension: Any = bounds_pb2.bound  # its stub has another type
    options = field.GetOptions()
    if not options.HasExtension(extension):
        return None
    option: bounds_pb2.Bound = options.Extensions[extension]
    by_limit = {
        bounds_pb2.SERVER_LIMIT_MAX_KEYS: limits.max_keys,
        bounds_pb2.SERVER_LIMIT_MAX_KEY_BYTES: limits.max_key_bytes,
        bounds_pb2.SERVER_LIMIT_MAX_FRAME_BYTES: limits.max_frame_bytes,
        bounds_pb2.SERVER_LIMIT_ALL_KEYS_BYTES: limits.max_keys * limits.max_key_bytes,
        bounds_pb2.SERVER_LIMIT_ALL_LENGTHS_BYTES: limits.max_keys * _LENGTH_BYTES,
    }
    each = option.max_characters or option.max_bytes or by_limit.get(option.max_bytes_by)
    reason = errors_pb2.ErrorReason.Name(option.reason).removeprefix("ERROR_REASON_") if option.reason else _INVALID
    return Bound(each, option.max_items or by_limit.get(option.max_items_by), reason)


def field_name(field: FieldDescriptor) -> str:
    """Returns the name of a field in refusals."""
    name: str = field.full_name
    return name.removeprefix(_PACKAGE)


class RequestBounds:
    """Checks serialized requests. Any thread may use it."""

    def __init__(self, limits: Limits) -> None:
        """Raises ValueError if a list, map, text or byte string of a request has no bound."""
        shapes = _Shapes(limits)
        self._shapes = {
            f"{service.name}/{method.name}": shapes.of(method.input_type)
            for service in _SERVICES
            for method in service.methods
        }

    def size_refusal(self, method: str, nbytes: int) -> OutOfBounds | None:
        """Returns the refusal of a request of this size; None if its fields can be in bounds.

        `method`: Service/Method. The reason is that of the fields that may have most bytes.
        """
        shape = self._shapes.get(method)
        most = _OTHER_BYTES if shape is None else shape.max_bytes
        if nbytes <= most:
            return None
        reason = _INVALID if shape is None else shape.room.most_common(1)[0][0]
        return OutOfBounds(reason, f"the request has {nbytes} bytes; the limit is {most}")

    def check(self, method: str, message: bytes) -> None:
        """Checks a request of a method (Service/Method). Raises `OutOfBounds`."""
        shape = self._shapes.get(method)
        if shape is None or len(message) > shape.max_bytes:
            self._check_large(method, message)
            return
        try:
            shape.check(message, 0, len(message), _MAX_FIELDS)
        except IndexError:
            raise _malformed() from None

    def _check_large(self, method: str, message: bytes) -> None:
        """Refuses a request with too many bytes; names the field if it is among the first."""
        shape, refusal = self._shapes.get(method), self.size_refusal(method, len(message))
        if refusal is None:
            return
        if shape is not None:
            with contextlib.suppress(IndexError, _TooManyFields):
                shape.check(message, 0, len(message), _FIELDS_OF_LARGE)
        raise refusal


class _Field:
    """Bound of a field in the form that `_Shape.check` needs."""

    __slots__ = (
        "each",
        "is_fixed_number",
        "is_list",
        "is_number",
        "is_text",
        "leaf_bytes",
        "most",
        "name",
        "reason",
        "shape",
    )

    def __init__(self, field: FieldDescriptor, bound: Bound, shape: _Shape | None) -> None:
        self.name = field_name(field)
        self.each = bound.each
        self.is_list = bound.most is not None
        self.most = 1 if bound.most is None else bound.most
        self.reason = bound.reason
        self.shape = shape
        self.is_text = field.type == field.TYPE_STRING
        self.is_number = shape is None and field.cpp_type != field.CPPTYPE_STRING
        self.leaf_bytes = bound.each if bound.each is not None and shape is None and not self.is_number else -1
        """Bytes of a text or byte string that are within its bound; -1 for other fields."""
        self.is_fixed_number = self.is_number and field.type not in (
            *(field.TYPE_INT32, field.TYPE_INT64, field.TYPE_UINT32, field.TYPE_UINT64),
            *(field.TYPE_SINT32, field.TYPE_SINT64, field.TYPE_BOOL, field.TYPE_ENUM),
        )

    @property
    def room(self) -> Counter[str]:
        """Most bytes of the field, as encoders write it, by the reason of a field with more."""
        if self.shape is not None and self.each is None:
            room = self.shape.room + Counter({self.reason: _HEAD_BYTES})
        else:
            each = _VARINT_BYTES if self.each is None else self.each * (_CHARACTER_BYTES if self.is_text else 1)
            room = Counter({self.reason: _HEAD_BYTES + each})
        return Counter({reason: self.most * nbytes for reason, nbytes in room.items()})

    def check(self, message: bytes, begin: int, end: int, left: int) -> tuple[int, int]:
        """Checks an element or a packed list. Returns how many elements it has, and `left`."""
        if self.each is not None and end - begin > self.each:
            self._check_size(message, begin, end)
        if self.shape is not None:
            return 1, self.shape.check(message, begin, end, left)
        return self._count(message, begin, end) if self.is_number else 1, left

    def _check_size(self, message: bytes, begin: int, end: int) -> None:
        if not self.is_text:
            raise OutOfBounds(self.reason, f"{self.name}: {end - begin} bytes; the limit is {self.each}")
        most = self.each or 0
        # The parser refuses a text that is not valid UTF-8.
        if end - begin > _CHARACTER_BYTES * most or len(message[begin:end].translate(None, _CONTINUATION)) > most:
            raise OutOfBounds(self.reason, f"{self.name}: more than {most} characters")

    def _count(self, message: bytes, begin: int, end: int) -> int:
        """Returns how many numbers a packed list has."""
        if self.is_fixed_number:
            return -(-(end - begin) // 4)
        if end - begin > _VARINT_BYTES * self.most:
            self.refuse_number()
        return len(message[begin:end].translate(None, _NO_TERMINATORS))

    def refuse_number(self) -> NoReturn:
        what = f"{self.most} elements" if self.is_list else "one occurrence"
        raise OutOfBounds(self.reason, f"{self.name}: more than {what} in one call")


class _Shape:
    """Fields of a message type, by number."""

    def __init__(self, fields: Mapping[int, _Field]) -> None:
        self._fields = fields
        self.room = sum((field.room for field in fields.values()), Counter({_INVALID: _UNKNOWN_BYTES}))
        """Most bytes of a message, by the reason of a message with more."""
        self.max_bytes = self.room.total()

    def check(self, message: bytes, pos: int, end: int, left: int) -> int:
        """Checks the fields between two positions. Returns how many more the request may have.

        Raises `OutOfBounds`, or IndexError if the message is cut off.
        """
        numbers: dict[_Field, int] = {}
        unknown_bytes = 0
        while pos < end:
            left -= 1
            if left < 0:
                raise _TooManyFields(_INVALID, f"the request has more than {_MAX_FIELDS} fields and elements")
            start = pos
            tag, pos = _varint(message, pos) if message[pos] > 127 else (message[pos], pos + 1)
            field, kind = self._fields.get(tag >> 3), tag & 7
            count = 1
            if kind == _DELIMITED:
                length, begin = _varint(message, pos) if message[pos] > 127 else (message[pos], pos + 1)
                pos = begin + length
                if pos > end:
                    break
                if field is not None and length > field.leaf_bytes:
                    count, left = field.check(message, begin, pos, left)
            else:
                is_short = kind == _VARINT and message[pos] < 128
                pos = pos + 1 if is_short else _skip_number(kind, message, pos)
            if field is not None:
                numbers[field] = count = count + numbers.get(field, 0)
                if count > field.most:
                    field.refuse_number()
            else:
                unknown_bytes += pos - start
                if unknown_bytes > _UNKNOWN_BYTES:
                    raise OutOfBounds(_INVALID, f"the message has more than {_UNKNOWN_BYTES} bytes in unknown fields")
        if pos != end:
            raise _malformed()
        return left


class _Shapes:
    """Creates the shapes of message types from their options, each once."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.of = cache(self._of)

    def _of(self, descriptor: Descriptor) -> _Shape:
        return _Shape({field.number: self._field(field) for field in descriptor.fields})

    def _field(self, field: FieldDescriptor) -> _Field:
        bound, inner = bound_of(field, self._limits), field.message_type
        is_text = field.cpp_type == field.CPPTYPE_STRING
        if bound is None:
            if field.is_repeated or is_text:
                raise ValueError(f"{field_name(field)} has no bound: it needs the option (bound)")
            bound = Bound()
        if field.is_repeated != (bound.most is not None) or (is_text and bound.each is None):
            raise ValueError(f"{field_name(field)}: the option (bound) does not fit the field")
        if inner is not None and inner.GetOptions().map_entry:
            # The fields of an entry can have no options. They have the bound of the map.
            each = Bound(bound.each, reason=bound.reason)
            entry = _Shape({part.number: _Field(part, each, None) for part in inner.fields})
            return _Field(field, Bound(None, bound.most, bound.reason), entry)
        return _Field(field, bound, None if inner is None else self.of(inner))


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


def _malformed() -> OutOfBounds:
    return OutOfBounds(_INVALID, "the message cannot be parsed: it is cut off or malformed")
