"""Parsers without a server: frames, headers, child messages, configuration and token files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from kvtier.protos.v1 import transfer_pb2
from kvtier.protos.wire import attach, call_frames, grpc_frames, packed_keys, tcp_frames
from kvtier.server.auth import tokens
from kvtier.server.bulk import messages
from kvtier.server.config.loader import load
from kvtier.server.config.schema import ConfigError
from kvtier.server.process import child_main
from kvtier.tiers.disk import format as disk_format
from kvtier.tiers.lmdb import format as lmdb_format

from .tape import Tape, byte

__all__ = ["Parsers", "seeds"]

_BAD = (ValueError, msgspec.MsgspecError)


class Parsers:
    """The target: parsers refuse invalid input with their documented exceptions only."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "file.toml"
        self._parsers: list[tuple[Callable[[bytes], object], tuple[type[Exception], ...]]] = [
            (grpc_frames.decode_push_frame, _BAD),
            (grpc_frames.decode_pull_frame, _BAD),
            (call_frames.unpack_call, _BAD),
            (call_frames.unpack_answer, _BAD),
            (attach.unpack_request, _BAD),
            (attach.unpack_reply, _BAD),
            (self._tcp_request, _BAD),
            (self._tcp_frame, _BAD),
            (tcp_frames.unpack_refusal, _BAD),
            (packed_keys.unpack_offsets, _BAD),
            (lambda data: packed_keys.unpack_keys(data[1:], data[0] if data else 0), _BAD),
            (self._child, _BAD),
            (messages.decode_to_child, _BAD),
            (messages.decode_from_child, _BAD),
            (self._tokens, (tokens.TokensError,)),
            (self._config, (ConfigError,)),
            (
                lambda data: lmdb_format.BlockRecord.unpack(b"name", _with_checksum(data)),
                (lmdb_format.DamagedRecordError,),
            ),
            (
                lambda data: disk_format.SlabRecord.unpack(b"name", _with_checksum(data)),
                (disk_format.DamagedRecordError,),
            ),
            (lmdb_format.BlockRecord.read, (lmdb_format.DamagedRecordError,)),
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
    def _tcp_request(data: bytes) -> None:
        if len(data) >= tcp_frames.REQUEST_BYTES:
            tcp_frames.unpack_request(data[: tcp_frames.REQUEST_BYTES])

    @staticmethod
    def _tcp_frame(data: bytes) -> None:
        if len(data) >= tcp_frames.FRAME_HEAD_BYTES:
            tcp_frames.unpack_frame_head(data[: tcp_frames.FRAME_HEAD_BYTES])

    @staticmethod
    def _child(data: bytes) -> None:
        if len(data) >= child_main.SIZES_BYTES:
            header, _ = child_main.read_sizes(data[: child_main.SIZES_BYTES])
            child_main.unpack(data[child_main.SIZES_BYTES :], header)

    def _tokens(self, data: bytes) -> Any:
        self._file.write_bytes(data)
        return tokens.read_token_file(self._file)

    def _config(self, data: bytes) -> Any:
        self._file.write_bytes(data)
        return load(file=self._file, environ={})


def _with_checksum(data: bytes) -> bytes:
    """An index with a valid checksum, so that the reader parses it."""
    return data + xxhash.xxh3_64_intdigest(b"name" + data).to_bytes(8, "little")


def seeds() -> Iterator[bytes]:
    """Valid input for each parser."""
    push = transfer_pb2.PushRequest(store_id=1, offset_bytes=2, payload=b"abc").SerializeToString()
    entry = tokens.format_entry("n", tokens.token_hash("t"), "acme", ["engine", "reader"], shared_memory=True)
    tables = '[limits]\nmax_keys = 7\n[[tiers]]\ntype = "lmdb"\nsize = "1MiB"\n[tenants.a]\nquota = "5%"\n'
    config = f'region_size = "8MiB"\n{tables}'
    sound: list[bytes] = [
        push,
        push,
        call_frames.pack_call(b"a/b", b"c")[4:],
        call_frames.pack_answer(0, b"c")[4:],
        attach.pack_request(bytes(16), 1),
        attach.pack_reply(1, granted=True),
        tcp_frames.pack_request(tcp_frames.Method.PUSH, b""),
        tcp_frames.pack_frame_head(1, 2, 3),
        tcp_frames.pack_refusal("INTERNAL", "x")[tcp_frames.ANSWER_BYTES :],
        packed_keys.pack_offsets([1, 2]),
        byte(3) + b"onetwo",
        child_main.pack({"a": 1}, b"x"),
        messages.encode(messages.Granted(1, [0], [1])),
        messages.encode(messages.Begin(1, True, bytes(16), 1, 2, "tcp")),
        entry.encode(),
        config.encode(),
        bytes(64),
        bytes(64),
        lmdb_format.BlockRecord(1, 2, (3, 4)).pack(b"name"),
    ]
    for number, data in enumerate(sound):
        yield byte(number) + data
