"""Parsers without a server: frames, headers, child messages, configuration and token files."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from google.protobuf.message import DecodeError

from kvtier.protos.v1.cache_pb2 import BeginRequestRequest
from kvtier.protos.v1.common_pb2 import PackedKeys
from kvtier.protos.wire import packed_keys
from kvtier.protos.wire import socket_frames as frames
from kvtier.protos.wire.request_bounds import OutOfBounds, RequestBounds
from kvtier.server.auth import tokens
from kvtier.server.auth.credential_files import FileError
from kvtier.server.bulk import messages
from kvtier.server.config.loader import load
from kvtier.server.config.schema import ConfigError, LimitConfig
from kvtier.server.process import child_main
from kvtier.tiers.disk import format as disk_format
from kvtier.tiers.lmdb import format as lmdb_format
from kvtier.tiers.remote import pack_format, value_codec
from kvtier.tiers.remote.mooncake import codes_in
from kvtier.tiers.remote.object_store import StoreUnavailableError
from kvtier.tiers.remote.resp import ErrorAnswer, RespConnection
from kvtier.tiers.remote.valkey_nodes import owners_in
from kvtier.tiers.secondary_tier import BlockBytes, NamespaceId, Outcome
from kvtier.tiers.storage.fsck import NAMESPACE_BYTES  # type: ignore[attr-defined]

from .tape import Tape, byte

__all__ = ["Parsers", "seeds"]

_BAD = (ValueError, msgspec.MsgspecError)
_SPACE = NamespaceId(bytes(NAMESPACE_BYTES))


class Parsers:
    """The target: parsers refuse invalid input with their documented exceptions only."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "file.toml"
        self._bounds = RequestBounds(LimitConfig())
        self._parsers: list[tuple[Callable[[bytes], object], tuple[type[Exception], ...]]] = [
            (self._hello, _BAD),
            (self._head, _BAD),
            (self._call, _BAD),
            (self._answer, _BAD),
            (self._data_head, _BAD),
            (self._region_answer, _BAD),
            (packed_keys.unpack_offsets, _BAD),
            (lambda data: packed_keys.unpack_key_list(PackedKeys.FromString(data)), (*_BAD, DecodeError)),
            (self._child, _BAD),
            (messages.decode_to_child, _BAD),
            (messages.decode_from_child, _BAD),
            (self._tokens, (FileError,)),
            (self._config, (ConfigError,)),
            (
                lambda data: lmdb_format.BlockRecord.unpack(b"name", _with_checksum(data)),
                (lmdb_format.DamagedRecordError,),
            ),
            (
                lambda data: disk_format.SlabRecord.unpack(b"name", _with_checksum(data)),
                (disk_format.DamagedRecordError,),  # type: ignore[attr-defined]
            ),
            (lmdb_format.parse_record, (lmdb_format.DamagedRecordError,)),
            (self._store_answers, (StoreUnavailableError,)),
            (self._store_value, (StoreUnavailableError,)),
            (self._pack_name, ()),
            (self._pack_index, _BAD),
            (self._block_value, ()),
            (lambda data: codes_in(data, 2), (*_BAD, RecursionError)),
            (self._request, (OutOfBounds,)),
        ]

    def run(self, data: bytes) -> None:
        """Parses an input with the parser that its first byte selects."""
        tape = Tape(data)
        parse, expected = self._parsers[tape.byte() % len(self._parsers)]
        with contextlib.suppress(*expected):
            parse(data[1:])

    def settle(self) -> str:
        return "nothing kept"

    def close(self) -> None: ...

    @staticmethod
    def _hello(data: bytes) -> None:
        head, token = data[: frames.HELLO_BYTES], data[frames.HELLO_BYTES :].decode("ascii")
        purpose = frames.purpose_of(head[:5])
        hello = frames.unpack_hello(head)
        assert purpose is hello.purpose
        if hello.token_bytes == len(token):
            assert frames.pack_hello(purpose, hello.session_id, hello.epoch, hello.number, token) == data

    @staticmethod
    def _head(data: bytes) -> None:
        if len(data) >= frames.HEAD_BYTES:
            frames.unpack_head(data)

    def _request(self, data: bytes) -> None:
        """A request within its bounds can be parsed; its lists are not longer than their bounds."""
        self._bounds.check("CacheService/BeginRequest", data)
        with contextlib.suppress(DecodeError):  # a text that is not valid
            request = BeginRequestRequest.FromString(data)
            assert len(request.exclude.names) <= 64
            assert len(request.exclude.media) <= 16
            assert len(request.request_id) <= 512

    @staticmethod
    def _call(data: bytes) -> None:
        packed = frames.pack_call(7, *frames.unpack_call(data))
        assert packed[frames.HEAD_BYTES :] == data
        assert frames.unpack_head(packed) == (len(data), frames.FrameKind.CALL, 7)

    @staticmethod
    def _answer(data: bytes) -> None:
        packed = frames.pack_answer(7, *frames.unpack_answer(data))
        assert packed[frames.HEAD_BYTES :] == data
        assert frames.unpack_head(packed) == (len(data), frames.FrameKind.ANSWER, 7)

    @staticmethod
    def _data_head(data: bytes) -> None:
        """Parses a head with a valid checksum and arbitrary fields, then one with any checksum."""
        size = frames.DATA_HEAD_BYTES
        if len(data) < size:
            return
        with contextlib.suppress(ValueError):  # the length is too small
            head = data[: size - 4] + xxhash.xxh32_intdigest(data[: size - 4]).to_bytes(4, "little")
            if frames.unpack_head(head)[1] is frames.FrameKind.DATA:
                assert frames.pack_data_head(*frames.unpack_data_head(head)) == head
        frames.unpack_data_head(data[:size])

    @staticmethod
    def _region_answer(data: bytes) -> None:
        assert frames.pack_region_answer(7, *frames.unpack_region_answer(data))[frames.HEAD_BYTES + 1 :] == data

    @staticmethod
    def _child(data: bytes) -> None:
        if len(data) >= child_main.SIZES_BYTES:
            header, _ = child_main.read_sizes(data[: child_main.SIZES_BYTES])
            child_main.unpack(data[child_main.SIZES_BYTES :], header)

    @staticmethod
    def _store_answers(data: bytes) -> None:
        """Answers of a remote store until the bytes end, also as slots of a cluster."""
        with _connection_with(data) as connection:
            while True:
                owners_in(connection.read(), "asked")

    @staticmethod
    def _store_value(data: bytes) -> None:
        with _connection_with(data) as connection:
            pieces = [memoryview(bytearray(size)) for size in (5, 0, 40)]
            size = connection.read_value(pieces)
            assert isinstance(size, ErrorAnswer) or size is None or 0 <= size <= len(data)

    @staticmethod
    def _pack_name(data: bytes) -> None:
        path = data.decode(errors="replace")
        name = pack_format.PackName.parse(path)
        assert name is None or (name.path == path and 0 < name.index_bytes <= pack_format.MAX_INDEX_BYTES)

    @staticmethod
    def _pack_index(data: bytes) -> None:
        """Parses entries with a valid seal, in a pack of any size, and any seal."""
        entries, pack_bytes = data[8:], int.from_bytes(data[:8], "little")
        sealed = value_codec.seal_index(_SPACE, "path", entries)
        assert value_codec.open_index(_SPACE, "path", sealed) == entries
        with contextlib.suppress(ValueError):
            places = pack_format.decode_index(entries, len(sealed), pack_bytes)
            assert all(
                len(sealed) <= each.offset_bytes < each.offset_bytes + each.nbytes <= pack_bytes for each in places
            )
            assert len({each.key for each in places}) == len(places)
        value_codec.open_index(_SPACE, "path", data)

    @staticmethod
    def _block_value(data: bytes) -> None:
        block = BlockBytes(_SPACE, b"key", (memoryview(bytearray(3)), memoryview(bytearray(5))))
        pieces = value_codec.pieces_of(block)
        if len(data) == value_codec.value_bytes(block):
            rest = memoryview(data)
            for piece in pieces:
                piece[:], rest = rest[: len(piece)], rest[len(piece) :]
        assert value_codec.decode(pieces, len(data), block) in (Outcome.DONE, Outcome.CORRUPT)

    def _tokens(self, data: bytes) -> Any:
        self._file.write_bytes(data)
        return tokens.read_token_file(self._file)

    def _config(self, data: bytes) -> Any:
        self._file.write_bytes(data)
        return load(file=self._file, environ={})


@contextlib.contextmanager
def _connection_with(data: bytes) -> Iterator[RespConnection]:
    """Yields a connection whose peer has sent the bytes and ended."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        connection = RespConnection(ours)
        connection.set_deadline(time.monotonic() + 5)
        yield connection


def _with_checksum(data: bytes) -> bytes:
    """An index with a valid checksum, so that the reader parses it."""
    return data + xxhash.xxh3_64_intdigest(b"name" + data).to_bytes(8, "little")


def seeds() -> Iterator[bytes]:
    """Valid input for each parser."""
    entry = tokens.format_entry("n", tokens.token_hash("t"), "acme", ["engine", "reader"], shared_memory=True)
    tables = '[limits]\nmax_keys = 7\n[[tiers]]\ntype = "lmdb"\nsize = "1MiB"\n[tenants.a]\nquota = "5%"\n'
    config = f'region_size = "8MiB"\n{tables}'
    other_lengths = packed_keys.pack_keys([b"one", b"three"])
    sound: list[bytes] = [
        frames.pack_hello(frames.Purpose.CALLS, bytes(16), 1, 2, "kvt_abc"),
        frames.pack_end(7),
        frames.pack_call(7, b"a/b", b"c")[frames.HEAD_BYTES :],
        frames.pack_answer(7, 5, b"c")[frames.HEAD_BYTES :],
        frames.pack_data_head(7, 1, 2, 3),
        frames.pack_region_answer(7, 8192, 4096, 8192)[frames.HEAD_BYTES + 1 :],
        packed_keys.pack_offsets([1, 2]),
        packed_keys.pack_keys([b"one", b"two"]).SerializeToString(),
        child_main.pack({"a": 1}, b"x"),
        messages.encode(messages.Granted(1, [0], [1])),
        messages.encode(messages.Begin(1, messages.Caller(bytes(16), 2, None, [], is_local=True), True, 3, [0])),
        entry.encode(),
        config.encode(),
        bytes(64),
        bytes(64),
        lmdb_format.BlockRecord(1, 2, (3, 4)).pack(b"name"),
        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\na\r\n:6379\r\n*0\r\n+OK\r\n",
        b"$45\r\n" + bytes(45) + b"\r\n",
        pack_format.PackName.new(pack_format.folder_of(_SPACE), 1e9, 64).path.encode(),
        (100).to_bytes(8, "little") + pack_format.encode_index([b"a", b"key"], [10, 20]),
        b"".join(value_codec.encode(BlockBytes(_SPACE, b"key", (memoryview(bytearray(3)), memoryview(bytearray(5)))))),
        b"[0, -704]",
        BeginRequestRequest(request_id="r", keys=other_lengths, exclude={"names": ["a"]}).SerializeToString(),
    ]
    for number, data in enumerate(sound):
        yield byte(number) + data
