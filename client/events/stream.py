"""Background reader of events, which never raises, and the description of blocks for events."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import grpc

from ...protos.credentials import Credentials
from ...protos.endpoint import client_endpoint
from ...protos.v1 import events_pb2, events_pb2_grpc
from ...protos.wire.block_contents import BlockContent
from ..session.fork_guard import ForkGuarded, fork_safe
from ..session.session import ClientSession
from ..sync import Client
from ..transport.grpc_methods import CHANNEL_OPTIONS
from .follower import BlockFollower, HeldChange

__all__ = ["EventStream", "describe_blocks"]

_RETRY_SECONDS = 0.2
_GONE_SECONDS = 10.0
"""After so long without the server, its blocks count as removed: engines cannot load them. A
restart takes less time, and then only the differences are reported."""


def describe_blocks(client: Client, keys: Sequence[bytes], contents: Sequence[BlockContent]) -> bool:
    """Describes blocks before the client stores them. Returns whether the server keeps this.

    The server drops the tokens when no tier has the block any more. Raises KVTierError.
    """
    return client._run(client._operations.describe(keys, contents))  # noqa: SLF001 - a part of the client


class EventStream(ForkGuarded):
    """Thread that reports which blocks of a client's namespace each medium holds.

    It uses its own connection, so that events never delay the client's calls.
    """

    def __init__(
        self,
        client: Client,
        on_changes: Callable[[Sequence[HeldChange]], object],
        on_error: Callable[[str], object],
        *,
        endpoint: str | None = None,
        credentials: Credentials | None = None,
        gone_seconds: float = _GONE_SECONDS,
        with_contents: bool = False,
    ) -> None:
        """Starts the thread. `endpoint` and `credentials` are those of the client.

        `with_contents`: whether stored blocks have their tokens, if the server knows them.

        `on_changes` runs on the thread and may block: then the server keeps the events, up to a
        limit, and later repeats what it holds. `on_error` gets a text for the log.
        """
        self._client = client
        self._on_changes = on_changes
        self._on_error = on_error
        self._gone_seconds = gone_seconds
        self._with_contents = with_contents
        self._follower = BlockFollower()
        credentials = credentials or Credentials.from_environment()
        self._channel = fork_safe(credentials.channel(client_endpoint(endpoint), CHANNEL_OPTIONS))
        self._stub = events_pb2_grpc.EventServiceStub(self._channel)
        self._closing = threading.Event()
        self._seen_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 2.0) -> None:
        """Ends the stream. Waits at most `timeout` seconds for the thread."""
        if self._is_forked:
            return
        self._closing.set()
        self._channel.close()
        self._thread.join(timeout)

    def _run(self) -> None:
        lost: list[HeldChange] = []  # reported until the callback accepts it
        while not self._closing.is_set():
            try:
                self._report(lost)
                lost = []
                session = self._client._transport.session  # noqa: SLF001 - a part of the client
                if session is not None:
                    self._read(session)
                if time.monotonic() - self._seen_at > self._gone_seconds:
                    lost = self._follower.lost()
            except Exception as error:  # noqa: BLE001 - the thread must go on, or a router would be misled for ever
                lost = [*lost, *self._follower.lost()]  # the next stream begins with a replay
                if not self._closing.is_set():
                    with contextlib.suppress(Exception):
                        self._on_error(f"the events of the server cannot be read: {error!r}")
            self._closing.wait(_RETRY_SECONDS)

    def _read(self, session: ClientSession) -> None:
        """Reads the events of one session until it ends."""
        request = events_pb2.WatchEventsRequest(
            session=session.ref, after=self._follower.cursor, with_contents=self._with_contents
        )
        stream = self._stub.WatchEvents(request)
        has_answered = False
        with session.cancelling(stream.cancel):
            try:
                for response in stream:
                    has_answered = True
                    self._report(self._follower.apply(response))
            except grpc.RpcError as error:
                if not self._closing.is_set() and error.code() is not grpc.StatusCode.CANCELLED:
                    self._on_error(f"the stream of events has ended: {error.details()}")
            finally:
                stream.cancel()
                if has_answered:
                    self._seen_at = time.monotonic()

    def _report(self, changes: Sequence[HeldChange]) -> None:
        if changes:
            self._on_changes(changes)
