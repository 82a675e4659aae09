"""A server under test, a session whose calls are fuzzed, and another client that must be served."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message
from harness.certificates import Authority
from harness.payloads import filled, is_payload, key_of, namespace_of, payload
from harness.polling import polls, wait_until
from harness.server_process import ServerProcess

from kvtier.client import Client, LeaseLost, Timeouts
from kvtier.client.transport.grpc_methods import CHANNEL_OPTIONS
from kvtier.protos.credentials import Credentials
from kvtier.protos.v1 import admin_pb2, common_pb2, session_pb2, session_pb2_grpc, transfer_pb2
from kvtier.server.app import Server
from kvtier.server.auth.tokens import format_entry, new_token, token_hash
from kvtier.server.config.loader import load

__all__ = ["IDS", "SESSION", "TIMEOUT", "Broken", "Errors", "Served"]

TIMEOUT = 5.0
SESSION, IDS = 1, 2
"""Flags of a message: fill in our session; fill in our leases and stores."""
_PART = 2048
_OTHER_PART = 16 << 10
"""Part of the other client, which stores a block per input: the index of a tier must hold all."""
_REGION, _TIER = 8 << 20, 16 << 20
_HEAD = """
insecure = {insecure}
region_size = {region}
listen = ["unix:{directory}/s", "127.0.0.1:0"]
data_dir = "{directory}/data"
"""
_SETTINGS = """
metrics = "127.0.0.1:0"
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
heartbeat_interval = "1s"
[auth]
tokens = "{directory}/tokens.toml"
"""
_LMDB = f'[[tiers]]\ntype = "lmdb"\nsize = {_TIER}\n'
_DISK = f'[[tiers]]\ntype = "disk"\nsize = {_TIER}\n'


class Broken(Exception):
    """The server misbehaved."""


class Errors(logging.Handler):
    """Records logged errors and exceptions: a defect is one even if the call was answered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        event = record.msg if isinstance(record.msg, dict) else {}
        text = f"{record.msg}"
        raised = record.exc_info or event.get("exc_info") or "Traceback" in text
        if record.levelno >= logging.ERROR or raised or "bulk process has ended" in text:
            self.seen.append(logging.Formatter().format(record))


class Served:
    """A running server with an open session `ref` of the tenant of `token`.

    The server runs on `loop` in this process, where the fuzzer sees which code an input reaches.
    Without `loop` it is a `process` of its own, whose memory can be measured.
    """

    def __init__(self, directory: Path, loop: asyncio.AbstractEventLoop | None, *, tls: bool = False) -> None:
        directory.mkdir()
        self.token = new_token()
        (directory / "tokens.toml").write_text(
            format_entry("t", token_hash(self.token), "acme", ["engine"], shared_memory=True)
        )
        text = _SETTINGS.format(directory=directory)
        self.credentials = Credentials(token=self.token)
        if tls:
            authority = Authority(directory)
            pair = authority.issue("server")
            text += f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n'
            self.credentials = Credentials(token=self.token, ca=authority.ca)
        self._loop = loop
        self.process: ServerProcess | None = None
        self.grpc_port: int
        self.metrics_port: int
        if loop is None:
            self._start_process(directory, text, tls=tls)
        else:
            self._start_here(directory, text, tls=tls)
        self.path = f"{directory}/s"
        options = [*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", 4 << 20)]
        self.channel = grpc.insecure_channel(f"unix:{self.path}", options)
        self._sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self._leases: list[int] = [1]
        self._stores: list[int] = [1]
        self._numbers = itertools.count()
        self.open()
        self.port = wait_until(self._locate)  # the first call starts the bulk process

    def _start_here(self, directory: Path, settings: str, *, tls: bool) -> None:
        head = _HEAD.format(directory=directory, region=_REGION, insecure="false" if tls else "true")
        config = directory / "kvtier.toml"
        config.write_text(head + settings + _LMDB + _DISK)
        self._server = Server(load(file=config, environ={}).config)
        self._on_loop(self._server.start())
        self.grpc_port, self.metrics_port = self._server.ports[0], self._server.metrics_port or 0

    def _start_process(self, directory: Path, settings: str, *, tls: bool) -> None:
        self.process = ServerProcess(
            directory, region=_REGION, lmdb=_TIER, config=settings, tier_config=_DISK, tcp=True, insecure=not tls
        ).start()
        ready = wait_until(lambda: re.search(r'"ports": \[(\d+).*"metrics_port": (\d+)', self.process.log))
        self.grpc_port, self.metrics_port = map(int, ready.groups())

    def _locate(self) -> int:
        request = transfer_pb2.LocateRequest(session=self.ref).SerializeToString()
        answer = self.channel.unary_unary("/kvtier.v1.TransferService/Locate")(request, timeout=TIMEOUT)
        return transfer_pb2.LocateResponse.FromString(answer).socket_port

    def open(self) -> None:
        """Opens our session and the one of the other client."""
        namespace = namespace_of(_PART, tenant="acme")
        request = session_pb2.OpenRequest(
            protocol_version=2, client_name="fuzz", engine_id="fuzz", rank=0, namespace=namespace.to_proto()
        )
        self._stream = self._sessions.Open(request)
        self.ref: common_pb2.SessionRef = next(self._stream).session
        timeouts = Timeouts(connect=TIMEOUT, call=TIMEOUT, transfer=TIMEOUT)
        self._other = Client(
            f"unix:{self.path}", namespace=namespace_of(_OTHER_PART, model="other"), transport="tcp", timeouts=timeouts
        )
        self._other.wait_until_connected(60)

    def check(self) -> None:
        """Raises if the other client is not served, or gets wrong bytes."""
        key = key_of(next(self._numbers), salt="other")
        self._other.wait_until_connected(TIMEOUT)
        self._other.store([key], [payload(key, _OTHER_PART).data])
        (found,) = filled(1, _OTHER_PART)
        for _ in polls(20):
            try:
                hits = self._other.load([key], [found.data])
                break
            except LeaseLost:
                continue  # a lease lasts one second, and a busy machine can pause for longer
        else:
            raise Broken("another client's leases end too early")
        if hits and not is_payload(key, found):
            raise Broken("another client gets wrong bytes")

    def end(self) -> None:
        """Ends the sessions; raises Broken if something is left."""
        self._stream.cancel()
        self._other.close()
        for _ in polls(20):
            if not (left := self._left()):
                return
        raise Broken(f"left behind: {left}")

    def close(self) -> None:
        self._stream.cancel()
        self._other.close()
        self.channel.close()
        if self.process is not None:
            self.process.close()
        else:
            self._on_loop(self._server.stop())

    def message(self, method: Any, flags: int, raw: bytes) -> bytes:
        """A request, with or without our session, leases and stores filled in."""
        if not flags & (SESSION | IDS) and method.name not in ("Drain", "Fsck"):
            return raw
        message = message_factory.GetMessageClass(method.input_type)()
        with contextlib.suppress(DecodeError):
            message.MergeFromString(raw)
        names = message.DESCRIPTOR.fields_by_name
        if flags & SESSION and "session" in names:
            message.session.CopyFrom(self.ref)  # type: ignore[attr-defined]
        if flags & IDS:
            for name, known in (("lease_id", self._leases), ("store_id", self._stores)):
                if name in names:
                    setattr(message, name, known[-1])
            if "lease_ids" in names:
                message.lease_ids.extend(self._leases[-2:])  # type: ignore[attr-defined]
        if isinstance(message, admin_pb2.FsckRequest):
            message.max_rate_bytes = 0  # a low rate is valid, but slower than any call
        if isinstance(message, admin_pb2.DrainRequest) and message.mode != admin_pb2.DRAIN_MODE_UNDO:
            message.mode = admin_pb2.DRAIN_MODE_STAY  # later steps need the server
        return message.SerializeToString()

    def remember_ids(self, method: Any, answer: bytes) -> None:
        message: Message = message_factory.GetMessageClass(method.output_type).FromString(answer)
        for name, known in (("lease_id", self._leases), ("store_id", self._stores)):
            if number := getattr(message, name, 0):
                known.append(number)
                del known[:-8]

    def _left(self) -> dict[str, int]:
        call = self.channel.unary_unary("/kvtier.v1.AdminService/GetStatus")
        status = admin_pb2.GetStatusResponse.FromString(call(b"", timeout=TIMEOUT))
        counts = {name: getattr(status, name) for name in ("leases", "stores", "holds", "quarantined_bytes")}
        counts["sessions"] = len(status.sessions)
        return {name: count for name, count in counts.items() if count}

    def _on_loop(self, work: Any) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)
