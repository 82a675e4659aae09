"""Session of a client, with the mapped shared-memory region if there is one."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import add
from typing import Literal

from ...cuda.host.pinning import Pin, Pinning
from ...cuda.host.region import HostRegion, Pool, RegionError
from ...protos.v1 import common_pb2, session_pb2
from ...protos.wire.socket_frames import (
    HEAD_BYTES,
    REGION_ANSWER_BYTES,
    Purpose,
    next_call_number,
    unpack_region_answer,
)
from ..errors import KVTierError, ServerError, SessionLost
from .fork_guard import ForkGuarded
from .socket_calls import SocketCalls, SocketTarget, answer_length, message_of

__all__ = ["AttachError", "Attachment", "ClientSession", "Slower"]

_log = logging.getLogger(__name__)

_ATTACH_SECONDS = 2.0

Slower = Literal[
    "kvtier: shared memory is not used",
    "kvtier: streams do not use the socket",
    "kvtier: calls do not use the socket",
    "kvtier: the region is not pinned, so copies to and from the GPU are slower",
]
"""What a client lacks, as the beginning of a log line."""


class AttachError(Exception):
    """The region cannot be mapped; the message gives the reason. Other transports still work."""


class Attachment:
    """The mapped region, and the socket over which the client received the region.

    The client closes the socket after its last copy. Then the server can reuse the session's slots.
    """

    def __init__(self, region: HostRegion, connection: socket.socket, pinning: Pinning | None) -> None:
        self.region = region
        self.pinning = pinning
        self._connection = connection

    @classmethod
    def connect(cls, target: SocketTarget, path: str, pin: Pin | None = None) -> Attachment:
        """Receives the region over the Unix socket at `path` and maps it. Raises `AttachError`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_ATTACH_SECONDS)
            connection.connect(path)
            target.check_owner(connection)
            number = next_call_number()
            connection.sendall(target.hello(Purpose.REGION, number))
            answer, descriptors, _, _ = socket.recv_fds(connection, REGION_ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            try:
                if len(answer) != REGION_ANSWER_BYTES or not descriptors:
                    raise RegionError("the server refused to send its region")
                answer_length(answer[:HEAD_BYTES], number)
                size_bytes, begin, end = unpack_region_answer(message_of(answer[HEAD_BYTES:]))
                region = HostRegion.attach([Pool(begin, end, descriptors[0])], size_bytes)
            finally:
                for descriptor in descriptors:
                    socket.close(descriptor)
        except (OSError, ValueError, RegionError, KVTierError) as error:
            connection.close()
            raise AttachError(f"{path}: {error}") from error
        connection.settimeout(None)
        return cls(region, connection, pin(region) if pin is not None else None)

    def disconnect(self) -> None:
        """Closes only the socket."""
        self._connection.close()

    def close(self) -> None:
        if self.pinning is not None:
            self.pinning.close()
        self.region.close()
        self._connection.close()


class ClientSession(ForkGuarded):
    """Session of a client, from `Open` to its end.

    Attributes:
        ref: reference to the session in calls.
        namespace_id: the server's id of the namespace; empty if the server knows no digests.
        region: the mapped region; None without one. Use it only between `begin_use` and `end_use`.
        transport: "shm" if the region is mapped; "tcp" while streams use raw sockets; else "grpc".
        transport_reason: reason for this transport, for logs.
        devices: whether the server can copy to and from devices.
        limits: limits of the server on one call.
        tiers: names of the tiers; `LookupResult.source_indices` are indices in this tuple.
        calls: sockets for unary calls; None if unary calls use gRPC.
        downgrades: causes for which this session is slower than it could be.
    """

    def __init__(
        self,
        ref: common_pb2.SessionRef,
        capabilities: session_pb2.CapabilitiesResponse,
        attachment: Attachment | None,
        transport_reason: str,
        calls: SocketCalls | None = None,
        warned: dict[Slower, str] | None = None,
        *,
        namespace_id: bytes = b"",
    ) -> None:
        """`warned`: causes that the client has logged, also in earlier sessions."""
        self.namespace_id = namespace_id
        self.downgrades: dict[Slower, str] = {}
        self._warned = {} if warned is None else warned
        self.ref = ref
        self.transport = "grpc" if attachment is None else "shm"
        self.transport_reason = transport_reason
        self.devices = capabilities.devices
        self.tiers = tuple(capabilities.tiers)
        self.limits = capabilities.limits
        self.calls = calls
        self.region = attachment.region if attachment is not None else None
        self._attachment = attachment
        # The garbage collector may end a use on a thread that holds the lock.
        self._lock = threading.RLock()
        self._users: set[weakref.ref[object]] = set()
        """A user is gone if an interrupt came within its `end_use`."""
        self.ended = False
        self._cancels: set[Callable[[], object]] = set()

    def downgraded(self, what: Slower, cause: str) -> None:
        """Records that this session is slower, and logs it unless the client has logged it."""
        self.downgrades[what] = cause
        if self._warned.get(what) != cause:
            self._warned[what] = cause
            _log.warning("%s: %s", what, cause)

    def recovered(self, what: Slower) -> None:
        self.downgrades.pop(what, None)
        self._warned.pop(what, None)

    def calls_used(self, *, refusal: str | None) -> None:
        """Called after a call over a socket, or over gRPC because of a `refusal`."""
        if refusal is not None:
            self.downgraded("kvtier: calls do not use the socket", refusal or "no connection")
        elif self.downgrades:
            self.recovered("kvtier: calls do not use the socket")

    def use_calls(self, calls: SocketCalls) -> None:
        """Uses `calls` for unary calls from now on. Closes them if the session has others."""
        with self._lock:
            is_unused = self.ended or self.calls is not None
            if not is_unused:
                self.calls = calls
        if is_unused:
            calls.close()

    def check_slots(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Raises `ServerError` if parts are not in the mapped pool. Copies check no addresses."""
        region = self.region
        if region is None:
            return
        # Offsets are not negative, so the pool that begins at 0 needs no comparison with its begin.
        is_before = region.begin > 0 and min(offsets, default=region.begin) < region.begin
        if len(offsets) != len(sizes) or is_before or max(map(add, offsets, sizes), default=0) > region.end:
            raise ServerError("the server named slots that are not in the memory of this client's tenant")

    def begin_use(self, user: weakref.ref[object]) -> None:
        """Keeps the region mapped and the slots reserved during a copy. Raises `SessionLost`."""
        with self._lock:
            if self.ended:
                raise SessionLost("the session has ended")
            self._users.add(user)

    def end_use(self, user: weakref.ref[object]) -> None:
        """Ends a use. Does nothing if `begin_use` has raised.

        `user` is the object that `begin_use` got: the collector clears a reference to garbage
        before it ends the use, and another reference would differ.
        """
        with self._lock:
            if user not in self._users:
                return
            self._users.remove(user)
            close = self.ended and not self._is_used()
        if close:
            self._close()

    @contextlib.contextmanager
    def cancelling(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Calls `cancel`, on any thread, if the session ends within the `with` block."""
        with self._lock:
            ended = self.ended
            self._cancels.add(cancel)
        if ended:
            cancel()
        try:
            yield
        finally:
            with self._lock:
                self._cancels.discard(cancel)

    def end(self) -> None:
        """Ends the session. The region is unmapped after its last use."""
        with self._lock:
            if self.ended:
                return
            self.ended = True
            close = not self._is_used()
            cancels = list(self._cancels)
        for cancel in cancels:
            cancel()
        if self.calls is not None:
            self.calls.close()
        if close:
            self._close()

    def _after_fork(self) -> None:
        """Closes the forked child's copy of the attachment's socket.

        Otherwise the server would keep the slots of a dead parent for as long as the child lives.
        """
        if self._attachment is not None:
            self._attachment.disconnect()

    def _is_used(self) -> bool:
        return any(user() is not None for user in list(self._users))

    def _close(self) -> None:
        if self._attachment is not None and not self._is_forked:  # the pinning is the parent's
            self._attachment.close()
