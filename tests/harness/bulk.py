"""The bulk process of a real server: its pid, and raw streams to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from kvtier.client import Client
from kvtier.client.part_streams import PartSender
from kvtier.client.transport.grpc_methods import CHANNEL_OPTIONS, LOCATE, PULL, PUSH, path_of, serialize
from kvtier.protos.v1 import transfer_pb2

from .long_timeouts import wait_until
from .raw import RawSession

__all__ = ["bulk_pid", "bulk_streams", "locate", "wait_for_bulk", "wait_until_received"]


def wait_for_bulk(client: Any) -> None:
    """Waits until a client's streams use the bulk process."""
    route = client._transport._bulk

    def found() -> bool:
        with contextlib.suppress(AttributeError):
            session = client._transport.session
            if session is not None:
                route.streams(session)
        return bool(route.found)

    wait_until(found)


def bulk_pid(server_pid: int) -> int | None:
    """The pid of a server's bulk process, if it has one."""
    for task in Path(f"/proc/{server_pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            for child in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    if b"kvtier.server.bulk" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return child
    return None


def locate(session: RawSession, store_id: int = 0) -> transfer_pb2.LocateResponse:
    """Calls Locate."""
    call = session.channel.unary_unary(path_of(LOCATE), serialize, transfer_pb2.LocateResponse.FromString)
    answer: transfer_pb2.LocateResponse = call(
        transfer_pb2.LocateRequest(session=session.ref, store_id=store_id), timeout=60
    )
    return answer


def wait_until_received(client: Client, source: PartSender, nbytes: int) -> None:
    """Waits until the server has received this many bytes of a client's store."""
    channel = client._transport._channel  # type: ignore[attr-defined]
    call = channel.unary_unary(path_of(LOCATE), serialize, transfer_pb2.LocateResponse.FromString)
    request = transfer_pb2.LocateRequest(session=source._ref, store_id=source._store_id)
    wait_until(lambda: call(request, timeout=60).received_bytes >= nbytes)


@contextlib.contextmanager
def bulk_streams(session: RawSession, endpoint: str) -> Iterator[None]:
    """Routes the streams of a raw session to the bulk process of the server at this Unix socket."""
    suffix = wait_until(lambda: locate(session).socket_suffix)
    before = session.push, session.pull
    with grpc.insecure_channel(endpoint + suffix, options=CHANNEL_OPTIONS) as channel:
        session.push = channel.stream_unary(PUSH, None, transfer_pb2.PushResponse.FromString)
        session.pull = channel.unary_stream(PULL, transfer_pb2.PullRequest.SerializeToString, None)
        try:
            yield
        finally:
            session.push, session.pull = before
