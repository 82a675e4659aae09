"""Sequences of RPCs over gRPC, connections of the socket protocol, and bytes sent to all ports."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import Message
from harness.server_process import MIB, bulk_pid, own_bytes

from kvtier.protos.v1 import (
    admin_pb2,
    cache_pb2,
    conversation_pb2,
    events_pb2,
    handoff_pb2,
    session_pb2,
    transfer_pb2,
)
from kvtier.protos.wire import socket_frames as frames
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import Purpose
from kvtier.server.config.schema import LogConfig
from kvtier.server.telemetry import logs

from . import sockets
from .served import IDS, SESSION, TIMEOUT, Broken, Errors, Served
from .sockets import Fault, Frame, Way
from .tape import Tape, byte, number, piece

__all__ = ["METHODS", "Calls", "Memory", "seeds"]

_MODULES = (admin_pb2, cache_pb2, handoff_pb2, session_pb2, transfer_pb2, events_pb2, conversation_pb2)
METHODS = [
    method
    for module in _MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
_UNCLEAN = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
_MOST_GROWTH = 96 * MIB
"""Bound of the growth of a process. In 240 s a server grew by 27 MiB."""
_SCRIPT = 128
"""Steps from this number on are scripts of connections, except a few."""


class Calls:
    """The target: `run` for each input, `settle` from time to time."""

    def __init__(self, directory: Path) -> None:
        self._errors = Errors()
        logs.configure(LogConfig(level="info"), stream=(directory / "log").open("w"))
        logging.getLogger().addHandler(self._errors)
        loop = self._loop()
        self._served = Served(directory / "a", loop)
        self._servers = [self._served, Served(directory / "b", loop, tls=True)]
        self._channel = self._served.channel
        self._tcp_channel = grpc.insecure_channel(f"127.0.0.1:{self._served.grpc_port}")
        self._baseline: tuple[int, int] | None = None
        self._drained = False

    def _loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the servers; None if each has a process of its own."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        return loop

    def run(self, data: bytes) -> None:
        """Makes the calls of an input. Raises Broken."""
        tape = Tape(data)
        try:
            for _ in range(16):
                if not tape:
                    break
                self._step(tape)
            self._cancel_drain()
            self._served.check()
        finally:  # the server's log explains the failure
            if self._errors.seen:
                raise Broken("\n".join(self._errors.seen))

    def settle(self) -> str:
        """Ends our sessions; raises Broken if something is left. Returns the figures."""
        for served in self._servers:
            served.end()
        try:
            return self._measure()
        finally:
            for served in self._servers:
                served.open()

    def _measure(self) -> str:
        """Returns memory and descriptors of this process, in which the servers run."""
        gc.collect()
        resident, descriptors = figures = _resources()
        if self._baseline is None:
            self._baseline = figures
        if descriptors > self._baseline[1] + 32:
            raise Broken(f"{descriptors} descriptors, {self._baseline[1]} at first")
        if resident > self._baseline[0] + (256 << 20):
            raise Broken(f"{resident >> 20} MiB of memory, {self._baseline[0] >> 20} at first")
        return (
            f"{resident >> 20} MiB, {descriptors} descriptors (at first {self._baseline[0] >> 20}, {self._baseline[1]})"
        )

    def close(self) -> None:
        self._tcp_channel.close()
        for served in self._servers:
            served.close()
        if self._errors.seen:
            raise Broken("\n".join(self._errors.seen))

    # ---- one step of an input

    def _step(self, tape: Tape) -> None:
        kind = tape.byte()
        doors: dict[int, Callable[[bytes], None]] = {
            249: self._call_with_a_bad_token,
            252: lambda data: self._send_bytes(self._served.metrics_port, data),
            254: lambda data: self._send_bytes(self._served.grpc_port, data),
        }
        if kind in doors:
            doors[kind](tape.piece())
        elif kind >= _SCRIPT:
            sockets.run(self._servers, METHODS, Tape(tape.piece()))
        else:
            method, flags = METHODS[kind % len(METHODS)], tape.byte()
            self._call(method, self._served.message(method, flags, tape.piece()))

    def _call(self, method: Any, message: bytes) -> None:
        path = f"/{method.containing_service.full_name}/{method.name}"
        self._drained |= method.name == "Drain"
        try:
            if method.client_streaming:
                answer = self._channel.stream_unary(path)(iter([message, message]), timeout=TIMEOUT)
            elif method.server_streaming:
                stream = self._channel.unary_stream(path)(message, timeout=TIMEOUT)
                try:
                    # Ends streams, which never end by themselves, and drains, which may wait for
                    # stores.
                    for _ in itertools.islice(stream, 2 if method.name in ("Open", "Drain", "WatchEvents") else 64):
                        pass
                finally:
                    stream.cancel()
                return
            else:
                answer = self._channel.unary_unary(path)(message, timeout=TIMEOUT)
        except grpc.RpcError as error:
            self._check(path, error.code(), error.details())
            return
        self._served.remember_ids(method, answer)

    def _cancel_drain(self) -> None:
        """Cancels a drain, because all later calls would be refused."""
        if not self._drained:
            return
        drain = self._channel.unary_stream(
            "/kvtier.v1.AdminService/Drain",
            admin_pb2.DrainRequest.SerializeToString,
            admin_pb2.DrainResponse.FromString,
        )
        list(drain(admin_pb2.DrainRequest(mode=admin_pb2.DRAIN_MODE_UNDO), timeout=TIMEOUT))
        self._drained = False

    @staticmethod
    def _check(path: str, code: grpc.StatusCode, details: str) -> None:
        if code in _UNCLEAN:
            raise Broken(f"{path}: {code.name}: {details}")

    def _call_with_a_bad_token(self, data: bytes) -> None:
        """Calls over TCP with arbitrary bytes as the token."""
        token = data.decode("latin-1")
        metadata = [("authorization", f"Bearer {token}")] if token.isascii() and token.isprintable() else []
        try:
            self._tcp_channel.unary_unary("/kvtier.v1.CacheService/Lookup")(data, timeout=TIMEOUT, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                raise Broken(f"a bad token gets {error.code()}: {error.details()}") from None
        else:
            raise Broken("a bad token was accepted")

    @staticmethod
    def _send_bytes(port: int | None, data: bytes) -> None:
        """Sends arbitrary bytes; a closed connection, an answer and silence are all accepted."""
        with socket.socket() as connection, contextlib.suppress(OSError):
            connection.settimeout(0.005)
            connection.connect(("127.0.0.1", port))
            connection.sendall(data)
            connection.recv(4096)


class Memory(Calls):
    """The target whose servers are processes of their own: `settle` measures their memory.

    It begins with the inputs that `Calls` has found. The process of the fuzzer has the servers'
    memory beside its own, so `Calls` cannot measure it.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._first = self._resident()

    def _loop(self) -> None:
        return None

    def _measure(self) -> str:
        for served in self._servers:
            assert served.process is not None
            if '"call failed"' in (log := served.process.log):
                raise Broken(log[log.index('"call failed"') - 200 :][:5000])
        texts = []
        for name, now in self._resident().items():
            first = self._first[name]
            texts.append(f"{name} {now / MIB:.0f} (at first {first / MIB:.0f}, growth {(now - first) / MIB:.0f})")
            if now - first > _MOST_GROWTH:
                raise Broken(f"MiB of memory: {texts[-1]}")
        return f"MiB of memory: {', '.join(texts)}"

    def _resident(self) -> dict[str, int]:
        """Resident bytes without shared memory, of each process of the servers."""
        pids = {}
        for served, way in zip(self._servers, ("without TLS", "with TLS"), strict=True):
            assert served.process is not None
            pids[f"server {way}"] = served.process.pid
            pids[f"its bulk process {way}"] = bulk_pid(served.process.pid) or 0
        return {name: own_bytes(pid) for name, pid in pids.items()}


def _resources() -> tuple[int, int]:
    """Resident bytes and open files of this process and of the servers' bulk processes."""
    pids = ["self"]
    for children in Path("/proc/self/task").glob("*/children"):
        pids += [pid for pid in children.read_text().split() if b"kvtier" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    resident = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)  # noqa: PTH208
    return resident * os.sysconf("SC_PAGE_SIZE"), descriptors


_INDEXES = {method.name: index for index, method in enumerate(METHODS)}


def _call(name: str, message: Message, flags: int = SESSION | IDS) -> bytes:
    return byte(_INDEXES[name]) + byte(flags) + piece(message.SerializeToString())


def _block(name: str) -> tuple[bytes, bytes]:
    """The calls that prepare the store of a block, and that look it up."""
    key = name.encode().ljust(16) + bytes(4)
    return (
        _call("PrepareStore", cache_pb2.PrepareStoreRequest(keys=pack_keys([key]), request_id=f"store {name}")),
        _call("Lookup", cache_pb2.LookupRequest(keys=pack_keys([key]), request_id=f"lookup {name}")),
    )


_PUSH = _call("Push", transfer_pb2.PushRequest(payload=bytes(64)))
_COMPLETE = _call("CompleteStore", cache_pb2.CompleteStoreRequest())
_PULL = _call("Pull", transfer_pb2.PullRequest(items=[0]))
_RELEASE = _call("ReleaseLease", cache_pb2.ReleaseLeaseRequest())


def seeds() -> Iterator[bytes]:
    """Seed inputs: the life of a block, each call alone, and wrong bytes for each port."""
    store, lookup = _block("grpc")
    yield store + _PUSH + _COMPLETE + lookup + _PULL + _RELEASE
    store, lookup = _block("hold")
    hold = handoff_pb2.PublishHoldRequest(
        request_id="r", keys=pack_keys([b"hold".ljust(16) + bytes(4)]), positions=[0], num_tokens=16
    )
    yield store + _COMPLETE + _call("PublishHold", hold) + _call("ClaimHold", handoff_pb2.ClaimHoldRequest())
    for method in METHODS:
        message = message_factory.GetMessageClass(method.input_type)()
        for flags in (0, SESSION | IDS):
            yield _call(method.name, message, flags)
        yield _script(sockets.hello(Way.UNIX, Purpose.CALLS), _calls(_call(method.name, message)))
    for way in Way:
        yield from _seeds_of_streams(way)
        for purpose in Purpose:
            yield from _seeds_of_connections(way, purpose)
    yield byte(249) + piece(b"kvt_abc")
    yield byte(252) + piece(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    yield byte(254) + piece(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")


def _script(start: bytes, *steps: bytes) -> bytes:
    return byte(_SCRIPT) + piece(start + b"".join(steps))


def _calls(*calls: bytes) -> bytes:
    """Steps of a script."""
    return b"".join(byte(Frame.CALL) + each + byte(Frame.READ) for each in calls)


def _seeds_of_streams(way: Way) -> Iterator[bytes]:
    def data(payload: bytes, wrong: int = 0, offset: int = 0) -> bytes:
        return byte(Frame.DATA) + number(offset) + byte(wrong) + piece(payload)

    calls, streams = (sockets.hello(way, purpose) for purpose in (Purpose.CALLS, Purpose.STREAMS))
    begin = byte(Frame.CALL) + _call("Push", transfer_pb2.PushRequest(complete=True))
    end = byte(Frame.END) + byte(Frame.READ)
    half = bytes(1024)
    pushes = [
        begin + data(half) + data(half, offset=1024) + end,
        *(begin + data(bytes(64), wrong) + end for wrong in (1, 2, 4, 8)),
        begin + data(half) + byte(Frame.CALL) + _PULL,
        begin + data(half) + end + _calls(_PUSH, _PULL),
    ]
    for index, push in enumerate(pushes):
        store, lookup = _block(f"{way.name} {index}")
        load = _script(calls, _calls(_COMPLETE, lookup)) + _script(streams, _calls(_PULL))
        yield _script(calls, _calls(store)) + _script(streams, push) + load + _script(calls, _calls(_RELEASE))
    yield _script(calls, _calls(store)) + _script(sockets.hello(way, Purpose.STREAMS, reads=False), pushes[0])


def _seeds_of_connections(way: Way, purpose: Purpose) -> Iterator[bytes]:
    _, lookup = _block("grpc")
    for choice in range(8):
        crossed = byte(Frame.CROSSED) + byte(choice) + number(choice)
        start = sockets.hello(way, purpose)
        yield _script(start, _calls(lookup), crossed, _calls(lookup))
        yield _script(start, byte(Frame.CALL), _PUSH, crossed, byte(Frame.END))
    for fault in Fault:
        raw = piece(frames.pack_hello(purpose, bytes(16), 1, 0)) if fault is Fault.BYTES else b""
        yield _script(sockets.hello(way, purpose, fault), raw)
    start = sockets.hello(way, purpose)
    yield _script(sockets.hello(way, purpose, waits=False), _calls(lookup, _PULL))
    yield _script(start, _calls(_RELEASE, lookup), byte(Frame.BYTES) + piece(b"\xff" * 64))
    yield _script(start, byte(Frame.HEAD) + number(20) + bytes((1, frames.FrameKind.CALL)))
    yield _script(start, byte(Frame.OVERSIZED) + number(16384), byte(Frame.OVERSIZED) + number(40000))
