"""Sequences of RPCs over gRPC, socket calls, TCP streams, the bulk process and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from kvtier.client.transport.grpc_methods import CHANNEL_OPTIONS
from kvtier.protos.v1 import (
    admin_pb2,
    cache_pb2,
    common_pb2,
    handoff_pb2,
    session_pb2,
    session_pb2_grpc,
    transfer_pb2,
)
from kvtier.protos.wire import tcp_frames
from kvtier.protos.wire.attach import REPLY_BYTES, Purpose, pack_request
from kvtier.protos.wire.call_frames import LENGTH_BYTES, pack_call, unpack_answer, unpack_length
from kvtier.server.app import Server
from kvtier.server.config.loader import load
from kvtier.server.config.schema import LogConfig
from kvtier.server.telemetry import logs

from .tape import Tape, byte, piece

__all__ = ["METHODS", "Calls", "seeds"]

_TIMEOUT = 5.0
_MODULES = (admin_pb2, cache_pb2, handoff_pb2, session_pb2, transfer_pb2)
METHODS = [
    method
    for module in _MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
_UNCLEAN = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
_SESSION, _IDS, _SOCKET, _BULK = 1, 2, 4, 8
"""Flags of a call: fill in our session, our leases and stores.

Use the Unix socket. Use the bulk process.
"""
_PART = 4096
_CONFIG = """
insecure = true
metrics = "127.0.0.1:0"
region_size = "8MiB"
listen = ["unix:{0}/s", "127.0.0.1:0"]
data_dir = "{0}/data"
[limits]
max_wait = "50ms"
max_keys = 4096
max_message_bytes = "2MiB"
max_frame_bytes = "64KiB"
[leases]
default = "1s"
max = "1s"
[handoff]
default = "6s"
max = "6s"
[retention]
max = "1s"
[sessions]
heartbeat_interval = "100ms"
[auth]
tokens = "{0}/tokens.toml"
[[tiers]]
type = "lmdb"
size = "16MiB"
[[tiers]]
type = "disk"
size = "16MiB"
"""


class Broken(Exception):
    """The server misbehaved."""


class _Errors(logging.Handler):
    """Records logged errors: a defect is one even if the call was answered."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(logging.Formatter().format(record))


class Calls:
    """The target: `run` for each input, `settle` from time to time."""

    def __init__(self, directory: Path) -> None:
        (directory / "tokens.toml").write_text(
            f'[[tokens]]\nname = "t"\nhash = "sha256:{"0" * 64}"\ntenant = "acme"\nroles = ["engine"]\n'
        )
        config = directory / "kvtier.toml"
        config.write_text(_CONFIG.format(directory))
        self._errors = _Errors()
        logs.configure(LogConfig(level="error"), stream=(directory / "log").open("w"))
        logging.getLogger().addHandler(self._errors)
        self._server = Server(load(file=config, environ={}).config)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._on_loop(self._server.start())
        self._path = f"{directory}/s"
        options = [*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", 4 << 20)]
        self._channel = grpc.insecure_channel(f"unix:{self._path}", options)
        self._tcp_channel = grpc.insecure_channel(f"127.0.0.1:{self._server.ports[0]}", options)
        self._sessions = session_pb2_grpc.SessionServiceStub(self._channel)
        self._namespace = common_pb2.Namespace(
            model="fuzz", dtype="uint8", world_size=1, groups=[common_pb2.Group(block_tokens=16, part_bytes=_PART)]
        )
        self._open()
        self._bulk_port = self._tcp_port = 0
        self._socket: socket.socket | None = None
        self._leases: list[int] = [1]
        self._stores: list[int] = [1]
        self._baseline: tuple[int, int] | None = None
        self._drained = False
        self._find_bulk()

    def run(self, data: bytes) -> None:
        """Makes the calls of an input. Raises Broken."""
        tape = Tape(data)
        try:
            for _ in range(16):
                if not tape:
                    break
                self._step(tape)
            self._cancel_drain()
        finally:  # the server's log explains the failure
            if self._errors.seen:
                raise Broken("\n".join(self._errors.seen))

    def settle(self) -> str:
        """Ends our session; raises Broken if something is left. Returns the figures."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._stream.cancel()
        deadline = time.monotonic() + 20
        while left := self._left():
            if time.monotonic() > deadline:
                raise Broken(f"left behind: {left}")
            time.sleep(0.05)
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        self._open()
        if self._baseline is None:
            self._baseline = resident, descriptors
        if descriptors > self._baseline[1] + 32:
            raise Broken(f"{descriptors} descriptors, {self._baseline[1]} at first")
        if resident > self._baseline[0] + (256 << 20):
            raise Broken(f"{resident >> 20} MiB of memory, {self._baseline[0] >> 20} at first")
        return (
            f"{resident >> 20} MiB, {descriptors} descriptors (at first {self._baseline[0] >> 20}, {self._baseline[1]})"
        )

    def close(self) -> None:
        self._channel.close()
        self._tcp_channel.close()
        self._on_loop(self._server.stop(), 60)
        if self._errors.seen:
            raise Broken("\n".join(self._errors.seen))

    # ---- the server's state

    def _left(self) -> dict[str, int]:
        with grpc.insecure_channel(f"unix:{self._path}") as channel:
            status = channel.unary_unary(
                "/kvtier.v1.AdminService/GetStatus", None, admin_pb2.GetStatusResponse.FromString
            )(b"", timeout=_TIMEOUT)
        counts = {name: getattr(status, name) for name in ("leases", "stores", "holds", "quarantined_bytes")}
        counts["sessions"] = len(status.sessions)
        return {name: count for name, count in counts.items() if count}

    def _open(self) -> None:
        self._request = session_pb2.OpenRequest(
            protocol_version=1, client_name="fuzz", engine_id="fuzz", rank=0, namespace=self._namespace
        )
        self._stream = self._sessions.Open(self._request)
        self._ref: common_pb2.SessionRef = next(self._stream).session

    def _find_bulk(self) -> None:
        locate = self._channel.unary_unary(
            "/kvtier.v1.TransferService/Locate",
            transfer_pb2.LocateRequest.SerializeToString,
            transfer_pb2.LocateResponse.FromString,
        )
        deadline = time.monotonic() + 30
        while not self._bulk_port:
            answer = locate(transfer_pb2.LocateRequest(session=self._ref), timeout=_TIMEOUT)
            self._bulk_port, self._tcp_port = answer.port, answer.plain_port
            if time.monotonic() > deadline:
                raise Broken("there is no bulk process")
            time.sleep(0.05)
        self._bulk = grpc.insecure_channel(f"127.0.0.1:{self._bulk_port}", CHANNEL_OPTIONS)

    def _on_loop(self, work: Any, seconds: float = 60.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    # ---- one step of an input

    def _step(self, tape: Tape) -> None:
        kind = tape.byte()
        doors: dict[int, Callable[[bytes], None]] = {
            249: self._call_with_a_bad_token,
            250: lambda data: self._send_bytes(socket.AF_UNIX, f"{self._path}.shm", data),
            251: lambda data: self._send_bytes(socket.AF_INET, ("127.0.0.1", self._tcp_port), data),
            252: lambda data: self._send_bytes(socket.AF_INET, ("127.0.0.1", self._server.metrics_port), data),
            253: self._send_to_socket,
            254: lambda data: self._send_bytes(socket.AF_INET, ("127.0.0.1", self._server.ports[0]), data),
            255: self._push_over_tcp,
        }
        if kind in doors:
            doors[kind](tape.piece())
        else:
            method, flags = METHODS[kind % len(METHODS)], tape.byte()
            self._call(method, flags, self._message(method, flags, tape.piece()))

    def _message(self, method: Any, flags: int, raw: bytes) -> bytes:
        """A message to send, with or without our session, leases and stores filled in."""
        if not flags & (_SESSION | _IDS):
            return raw
        message = message_factory.GetMessageClass(method.input_type)()
        with contextlib.suppress(DecodeError):
            message.MergeFromString(raw)
        names = message.DESCRIPTOR.fields_by_name
        if flags & _SESSION and "session" in names:
            message.session.CopyFrom(self._ref)  # type: ignore[attr-defined]
        if flags & _IDS:
            for name, known in (("lease_id", self._leases), ("store_id", self._stores)):
                if name in names:
                    setattr(message, name, known[-1])
            if "lease_ids" in names:
                message.lease_ids.extend(self._leases[-2:])  # type: ignore[attr-defined]
        return message.SerializeToString()

    def _call(self, method: Any, flags: int, message: bytes) -> None:
        path = f"/{method.containing_service.full_name}/{method.name}"
        if method.name == "Drain":
            message, self._drained = _without_exit(message), True
        if method.name == "Fsck":
            message = _with_full_rate(message)
        if flags & _SOCKET and not (method.client_streaming or method.server_streaming):
            self._call_on_socket(f"{method.containing_service.name}/{method.name}".encode(), message)
            return
        channel = self._bulk if flags & _BULK and method.name in ("Push", "Pull") else self._channel
        try:
            if method.client_streaming:
                answer = channel.stream_unary(path)(iter([message, message]), timeout=_TIMEOUT)
            elif method.server_streaming:
                stream = channel.unary_stream(path)(message, timeout=_TIMEOUT)
                try:
                    # Ends streams, which never end by themselves, and drains, which may wait for
                    # stores.
                    for _ in itertools.islice(stream, 2 if method.name in ("Open", "Drain") else 64):
                        pass
                finally:
                    stream.cancel()
                return
            else:
                answer = channel.unary_unary(path)(message, timeout=_TIMEOUT)
        except grpc.RpcError as error:
            self._check(path, error.code(), error.details())
            return
        self._remember_ids(method, answer)

    def _cancel_drain(self) -> None:
        """Cancels a drain, because all later calls would be refused."""
        if not self._drained:
            return
        drain = self._channel.unary_stream(
            "/kvtier.v1.AdminService/Drain",
            admin_pb2.DrainRequest.SerializeToString,
            admin_pb2.DrainResponse.FromString,
        )
        list(drain(admin_pb2.DrainRequest(mode=admin_pb2.DRAIN_MODE_UNDO), timeout=_TIMEOUT))
        self._drained = False

    @staticmethod
    def _check(path: str, code: grpc.StatusCode, details: str) -> None:
        if code in _UNCLEAN:
            raise Broken(f"{path}: {code.name}: {details}")

    def _remember_ids(self, method: Any, answer: bytes) -> None:
        message: Message = message_factory.GetMessageClass(method.output_type).FromString(answer)
        for name, known in (("lease_id", self._leases), ("store_id", self._stores)):
            if number := getattr(message, name, 0):
                known.append(number)
                del known[:-8]

    def _call_with_a_bad_token(self, data: bytes) -> None:
        """Calls over TCP with arbitrary bytes as the token."""
        token = data.decode("latin-1")
        metadata = [("authorization", f"Bearer {token}")] if token.isascii() and token.isprintable() else []
        try:
            self._tcp_channel.unary_unary("/kvtier.v1.CacheService/Lookup")(data, timeout=_TIMEOUT, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                raise Broken(f"a bad token gets {error.code()}: {error.details()}") from None
        else:
            raise Broken("a bad token was accepted")

    @staticmethod
    def _send_bytes(family: int, address: Any, data: bytes) -> None:
        """Sends arbitrary bytes; a closed connection, an answer and silence are all accepted."""
        with socket.socket(family, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
            connection.settimeout(0.005)
            connection.connect(address)
            connection.sendall(data)
            connection.recv(4096)

    def _attach_connection(self) -> socket.socket:
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(_TIMEOUT)
            connection.connect(f"{self._path}.shm")
            connection.sendall(pack_request(self._ref.session_id, self._ref.epoch, Purpose.CALLS))
            if len(connection.recv(REPLY_BYTES)) != REPLY_BYTES:
                connection.close()
                raise Broken("no connection for socket calls")
            self._socket = connection
        return self._socket

    def _send_to_socket(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            connection = self._attach_connection()
            connection.sendall(data)
            connection.settimeout(0.005)
            connection.recv(4096)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _call_on_socket(self, name: bytes, message: bytes) -> None:
        connection = self._attach_connection()
        connection.sendall(pack_call(name, message))
        data = b""
        try:
            while len(data) < LENGTH_BYTES or len(data) < LENGTH_BYTES + unpack_length(data):
                got = connection.recv(1 << 16)
                if not got:
                    raise Broken(f"{name!r}: connection closed in the middle of a call")
                data += got
        except TimeoutError:
            raise Broken(f"{name!r}: no answer") from None
        code, _ = unpack_answer(data[LENGTH_BYTES:])
        self._check(name.decode(), next(c for c in grpc.StatusCode if c.value[0] == code), "over the Unix socket")

    def _push_over_tcp(self, data: bytes) -> None:
        """A valid push over the TCP stream up to its frames."""
        request = transfer_pb2.PushRequest(session=self._ref, store_id=self._stores[-1])
        head = tcp_frames.pack_request(tcp_frames.Method.PUSH, request.SerializeToString())
        frame = tcp_frames.pack_frame_head(0, min(len(data), _PART), 0)
        self._send_bytes(socket.AF_INET, ("127.0.0.1", self._tcp_port), head + frame + data)


def _with_full_rate(message: bytes) -> bytes:
    """Sets the highest read rate of a check; a low one is valid, but slower than any call."""
    with contextlib.suppress(DecodeError):
        request = admin_pb2.FsckRequest.FromString(message)
        request.max_rate_bytes = 0
        return request.SerializeToString()
    return message


def _without_exit(message: bytes) -> bytes:
    """A drain request that does not end the server, because later steps need it."""
    try:
        request = admin_pb2.DrainRequest.FromString(message)
    except DecodeError:
        return message
    if request.mode in (admin_pb2.DRAIN_MODE_UNSPECIFIED, admin_pb2.DRAIN_MODE_END):
        request.mode = admin_pb2.DRAIN_MODE_STAY
    return request.SerializeToString()


def seeds() -> Iterator[bytes]:
    """Seed inputs: the life of a block, each call alone, and a word to each interface."""
    number = {method.name: index for index, method in enumerate(METHODS)}
    key = bytes(16) + bytes(4)

    def call(name: str, message: Message, flags: int = _SESSION | _IDS) -> bytes:
        return byte(number[name]) + byte(flags) + piece(message.SerializeToString())

    store = call("PrepareStore", cache_pb2.PrepareStoreRequest(keys=[key], request_id="r"))
    frame = call("Push", transfer_pb2.PushRequest(payload=bytes(64)))
    ended = call("CompleteStore", cache_pb2.CompleteStoreRequest())
    packed = common_pb2.PackedKeys(keys=key, key_bytes=len(key))
    lookup = call("Lookup", cache_pb2.LookupRequest(packed_keys=packed, request_id="r"))
    pull = call("Pull", transfer_pb2.PullRequest(items=[0]))
    release = call("ReleaseLease", cache_pb2.ReleaseLeaseRequest())
    yield store + frame + ended + lookup + pull + release
    yield store + call("Push", transfer_pb2.PushRequest(payload=bytes(64)), _SESSION | _IDS | _BULK) + lookup
    hold = handoff_pb2.PublishHoldRequest(request_id="r", keys=[key], positions=[0], num_tokens=16)
    yield store + ended + call("PublishHold", hold) + call("ClaimHold", handoff_pb2.ClaimHoldRequest())
    yield store + byte(255) + piece(bytes(64)) + ended
    for method in METHODS:
        message = message_factory.GetMessageClass(method.input_type)()
        for flags in (0, _SESSION | _IDS, _SESSION | _IDS | _SOCKET):
            yield call(method.name, message, flags)
    yield byte(249) + piece(b"kvt_abc")
    for purpose in Purpose:
        yield byte(250) + piece(pack_request(bytes(16), 1, purpose))
    for method in tcp_frames.Method:
        yield byte(251) + piece(tcp_frames.pack_request(method, b""))
    yield byte(252) + piece(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    yield byte(253) + piece(pack_call(b"CacheService/Lookup", b""))
    yield byte(254) + piece(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
