"""A session that is open, and the memory through which its bytes go."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...cuda.host.pinning import Pin, Pinning
from ...cuda.host.region import HostRegion, RegionError
from ...protos.v1 import common_pb2, session_pb2
from ...protos.wire.attach import REPLY_BYTES, pack_request, unpack_reply
from ..errors import SessionLost
from .socket_calls import SocketCalls

__all__ = ["AttachError", "Attachment", "Limits", "Session"]

_ATTACH_SECONDS = 2.0


class AttachError(Exception):
    """The region cannot be mapped from here; the message says why. The grpc transport still works."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server lets a call ask for."""

    max_keys: int
    max_frame_bytes: int
    max_wait: float


class Attachment:
    """The region, mapped, and the connection that tells the server so.

    The connection is closed when nobody copies any more: its end lets the server reuse our slots.
    """

    def __init__(self, region: HostRegion, connection: socket.socket, pinning: Pinning | None) -> None:
        self.region = region
        self.pinning = pinning
        self._connection = connection

    @classmethod
    def connect(cls, path: str, session: common_pb2.SessionRef, pin: Pin | None = None) -> Attachment:
        """Fetches the region's descriptor over the Unix socket at `path` and maps it; `pin` makes what pins it, later.

        Raises:
            AttachError: there is no such socket here, the server refused, or the kernel did.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_ATTACH_SECONDS)
            connection.connect(path)
            connection.sendall(pack_request(session.session_id, session.epoch))
            reply, descriptors, _, _ = socket.recv_fds(connection, REPLY_BYTES, 1)
            try:
                size_bytes = unpack_reply(reply)
                if size_bytes is None or not descriptors:
                    raise AttachError("the server refused to hand out its region")
                region = HostRegion.attach(descriptors[0], size_bytes)
            finally:
                for descriptor in descriptors:
                    socket.close(descriptor)
        except (OSError, ValueError, RegionError) as error:
            connection.close()
            raise AttachError(f"{path}: {error}") from error
        except AttachError:
            connection.close()
            raise
        connection.settimeout(None)
        return cls(region, connection, pin(region) if pin is not None else None)

    def close(self) -> None:
        """Unpins and unmaps the region, and hangs up."""
        if self.pinning is not None:
            self.pinning.close()
        self.region.close()
        self._connection.close()


class Session:
    """One session of a client, from `Open` until it falls.

    Attributes:
        ref: how calls name the session.
        transport: "shm" where the region is mapped; "tcp" as long as streams go over plain sockets; else "grpc".
        why: why this transport, for people.
        devices: whether the server moves bytes of devices.
        tiers: names of the tiers, as `sources` indexes them.
        takes_packed_keys: whether calls may carry their keys packed.
        calls: what calls go over instead of gRPC; None where they go over gRPC.
    """

    def __init__(
        self,
        ref: common_pb2.SessionRef,
        capabilities: session_pb2.CapabilitiesResponse,
        attachment: Attachment | None,
        why: str,
        calls: SocketCalls | None = None,
    ) -> None:
        self.ref = ref
        self.transport = "grpc" if attachment is None else "shm"
        self.why = why
        self.devices = capabilities.devices
        self.tiers = tuple(capabilities.tiers)
        self.limits = Limits(
            max_keys=capabilities.limits.max_keys,
            max_frame_bytes=capabilities.limits.max_frame_bytes,
            max_wait=capabilities.limits.max_wait.ToNanoseconds() / 1e9,
        )
        self.takes_packed_keys = capabilities.packed_keys
        self.calls = calls
        self._attachment = attachment
        self._lock = threading.Lock()
        self._users = 0
        self._fallen = False
        self._cancels: set[Callable[[], object]] = set()

    def call_over(self, calls: SocketCalls) -> None:
        """Has calls go this way from now on, as long as the link stands; instead of an earlier way, which is given up."""
        with self._lock:
            unused = calls if self._fallen else self.calls
            if not self._fallen:
                self.calls = calls
        if unused is not None:
            unused.close()

    @property
    def fallen(self) -> bool:
        """Whether the session is over."""
        return self._fallen

    @property
    def region(self) -> HostRegion | None:
        """The mapped region; use it within `using` only."""
        return self._attachment.region if self._attachment else None

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keeps the region mapped, and our slots ours, while bytes are copied.

        Raises:
            SessionLost: the session is over already.
        """
        with self._lock:
            if self._fallen:
                raise SessionLost("the session has ended")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                close = self._fallen and not self._users
            if close:
                self._close()

    @contextlib.contextmanager
    def cancelling(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Calls `cancel`, on whichever thread notices, if the session falls meanwhile: a stream must not outlast it."""
        with self._lock:
            fallen = self._fallen
            self._cancels.add(cancel)
        if fallen:
            cancel()
        try:
            yield
        finally:
            with self._lock:
                self._cancels.discard(cancel)

    def fall(self) -> None:
        """Ends the link; what it holds is given up as soon as nobody uses it."""
        with self._lock:
            if self._fallen:
                return
            self._fallen = True
            close = not self._users
            cancels = list(self._cancels)
        for cancel in cancels:
            cancel()
        if self.calls is not None:
            self.calls.close()
        if close:
            self._close()

    def _close(self) -> None:
        if self._attachment is not None:
            self._attachment.close()
