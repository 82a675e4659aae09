"""Keeps a session open: connects, listens to heartbeats, and starts anew when the server is gone or another one.

One thread connects and watches, a second one per connection reads heartbeats (gRPC's blocking iterator has no time-out of its
own). A server that hangs is noticed by its silence, one that dies by the end of the stream, one that was restarted by both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from ...cuda.host.pinning import Pin
from ...cuda.host.warmup import warm_up
from ...protos.v1 import session_pb2, session_pb2_grpc
from ..errors import AccessDenied, Draining, InvalidRequest, KVTierError, NotConnected, ServerError, error_from_status
from ..namespace import Namespace
from .session import AttachError, Attachment, Session
from .socket_calls import SocketCalls

__all__ = ["ClientIdentity", "SessionConnection", "Transport"]

_log = logging.getLogger(__name__)

Transport = Literal["auto", "shm", "tcp", "grpc", "cuda_ipc"]

PROTOCOL_VERSION = 1
_SILENT_INTERVALS = 5
"""A host that is short of processors makes even a live server fall silent for a second or two."""
_NOT_SHARED = "the server does not share its memory with these credentials (shared_memory)"
_FIRST_RETRY_SECONDS = 0.05
_LAST_RETRY_SECONDS = 1.0

_random = random.SystemRandom()  # an engine may have seeded the other one; and what it forks would be in step


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """Who opens a session, and what for."""

    namespace: Namespace
    name: str
    engine_id: str
    rank: int | None
    transport: Transport
    pin: Pin | None = None


class SessionConnection:
    """Keeps a link to the server, whatever happens to either side."""

    def __init__(self, channel: grpc.Channel, identity: ClientIdentity, call_timeout: float) -> None:
        self._stub = session_pb2_grpc.SessionServiceStub(channel)
        self._identity = identity
        self._call_timeout = call_timeout
        self._changed = threading.Condition()
        self._link: Session | None = None
        self._error: KVTierError | None = None
        self._closing = threading.Event()
        self._asking: Any = None
        self._beats: _Heartbeats | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier-session", daemon=True)
        self._thread.start()

    @property
    def link(self) -> Session | None:
        """The link, if there is one now."""
        link = self._link
        return None if link is None or link.fallen else link

    def wait(self, seconds: float, *, patient: bool = False) -> Session:
        """Returns the link; waits only while the first attempt to connect is under way, unless `patient`.

        Raises:
            KVTierError: there is none; the last attempt's error, if there was one.
        """
        link = self.link
        if link is not None:
            return link
        with self._changed:
            # A link that has fallen is still there until the thread has noticed: no answer either, and no error yet.
            self._changed.wait_for(
                lambda: self.link or (not patient and (self._error or self._link)) or self._closing.is_set(), seconds
            )
            link = self.link
            if link is not None:
                return link
            if self._closing.is_set():
                raise NotConnected("the client is closed")
            if self._error is None:
                raise NotConnected("the session has ended" if self._link else "no server has answered yet")
            # A new one for every caller: a raised exception keeps, and adds to, the frames that it passed through.
            raise type(self._error)(str(self._error), self._error.reason)

    def lost(self, link: Session) -> None:
        """Takes note that the server does not know the session of this link any more."""
        link.fall()
        with self._changed:
            # Once another session has taken its place, news of the old one is no news.
            beats = self._beats if self._link is link else None
        if beats is not None:
            beats.cancel()

    def close(self) -> None:
        """Ends the session. Waits for the thread."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._asking is not None:
            self._asking.cancel()
        if self._beats is not None:
            self._beats.cancel()
        self._thread.join()

    def _run(self) -> None:
        delay = _FIRST_RETRY_SECONDS
        while not self._closing.is_set():
            try:
                self._hold_session()
                delay = _FIRST_RETRY_SECONDS
            except KVTierError as error:
                self._report(error)
                delay = min(2 * delay, _LAST_RETRY_SECONDS)
            except Exception as error:  # noqa: BLE001 - no threads, no descriptors: later there may be some again
                _log.exception("kvtier: cannot open a session")
                self._report(ServerError(f"{type(error).__name__}: {error}"))
                delay = _LAST_RETRY_SECONDS
            # Jittered, so that the engines of a host do not come back in step.
            self._closing.wait(delay * _random.uniform(0.5, 1.0))

    def _hold_session(self) -> None:
        """Opens a session and returns when it is over; raises if it cannot be opened."""
        try:
            self._asking = self._stub.Capabilities.future(session_pb2.CapabilitiesRequest(), timeout=self._call_timeout)
            if self._closing.is_set():  # `close` came before there was a call that it could have cancelled
                self._asking.cancel()
            capabilities = self._asking.result()
            transport = self._pick_transport(capabilities)
            self._beats = beats = _Heartbeats(self._stub.Open(self._open_request(transport)))
            if self._closing.is_set():  # `close` came before there was a stream that it could have cancelled
                beats.cancel()
            try:
                first = beats.first(self._call_timeout)
                link = self._make_link(first, capabilities, transport)
                self._publish(link)
                try:
                    while beats.next_within(_SILENT_INTERVALS * first.heartbeat_interval.ToNanoseconds() / 1e9):
                        pass
                finally:
                    self._retire(link)
            finally:
                beats.cancel()
        except grpc.RpcError as error:
            raise error_from_status(error.code(), error.details(), error.trailing_metadata()) from None
        except grpc.FutureCancelledError:
            raise NotConnected("the client is closed") from None
        except TimeoutError:
            raise NotConnected("the server did not open a session in time") from None

    def _pick_transport(self, capabilities: session_pb2.CapabilitiesResponse) -> str:
        if self._identity.transport in ("grpc", "tcp"):
            return "grpc"
        if not capabilities.HasField("region"):
            if self._asked_for("shm"):
                raise AccessDenied(f"transport shm: {_NOT_SHARED}")
            return "grpc"
        if os.path.exists(capabilities.region.attach_path):  # noqa: PTH110 - a path of somebody else's host, perhaps
            return "shm"
        if self._identity.transport == "shm":
            raise InvalidRequest(f"transport shm: no {capabilities.region.attach_path} on this host")
        return "grpc"

    def _open_request(self, transport: str) -> session_pb2.OpenRequest:
        identity = self._identity
        return session_pb2.OpenRequest(
            protocol_version=PROTOCOL_VERSION,
            client_name=identity.name,
            engine_id=identity.engine_id,
            rank=identity.rank,
            namespace=identity.namespace.to_proto(),
            pid=os.getpid(),
            transport=transport,
        )

    def _make_link(
        self, first: session_pb2.OpenResponse, capabilities: session_pb2.CapabilitiesResponse, transport: str
    ) -> Session:
        if first.session.epoch != capabilities.epoch:
            # What the one said of its tiers and limits is not true of the other.
            raise NotConnected("the server was restarted while a session was opened")
        if transport == "grpc":
            why = "another host" if capabilities.HasField("region") else _NOT_SHARED
            asked_for = self._asked_for("grpc") or self._asked_for("tcp")
            return Session(first.session, capabilities, None, "asked for" if asked_for else why)
        try:
            attachment = Attachment.connect(capabilities.region.attach_path, first.session, self._identity.pin)
        except AttachError as error:
            if self._asked_for("shm"):
                # Most likely the server was killed a moment ago. Nobody asked for anything that cannot be had.
                raise NotConnected(f"transport shm: {error}") from error
            return Session(first.session, capabilities, None, f"shm failed: {error}")
        calls = SocketCalls(capabilities.region.attach_path, first.session) if capabilities.region.takes_calls else None
        if calls is not None and not calls.prepare():
            calls = None
        link = Session(first.session, capabilities, attachment, "same host", calls)
        with contextlib.suppress(RuntimeError):  # no thread to be had: then the first copies are slower
            arguments = (attachment.region, attachment.pinning, lambda: link.fallen)
            threading.Thread(target=warm_up, args=arguments, name="kvtier-warmup", daemon=True).start()
        return link

    def _asked_for(self, transport: str) -> bool:
        return self._identity.transport == transport

    def _publish(self, link: Session) -> None:
        _log.info("kvtier: session open, transport %s (%s)", link.transport, link.why)
        with self._changed:
            self._link = link
            self._error = None
            self._changed.notify_all()

    def _retire(self, link: Session) -> None:
        link.fall()
        with self._changed:
            self._link = None
            self._error = NotConnected("the session has ended; connecting again")
        if not self._closing.is_set():
            _log.warning("kvtier: session lost, connecting again")

    def _report(self, error: KVTierError) -> None:
        with self._changed:
            known = type(self._error) is type(error)
            self._link = None
            self._error = error
            self._changed.notify_all()
        if not known and not isinstance(error, Draining):
            _log.warning("kvtier: cannot open a session: %s", error)


class _Heartbeats:
    """Heartbeats of one stream, read on a thread of their own so that their absence can be noticed."""

    def __init__(self, stream: Any) -> None:  # grpc has no type for a call that is an iterator as well
        self._stream = stream
        self._news = threading.Condition()
        self._count = 0
        self._first: session_pb2.OpenResponse | None = None
        self._ended = False
        self._error: grpc.RpcError | None = None
        threading.Thread(target=self._read, name="kvtier-heartbeats", daemon=True).start()

    def first(self, seconds: float) -> session_pb2.OpenResponse:
        """Returns the first response. Raises `grpc.RpcError` or `TimeoutError`."""
        with self._news:
            self._news.wait_for(lambda: self._count or self._ended, seconds)
            if self._first is not None:
                return self._first
            self._stream.cancel()
            if self._error is not None:
                raise self._error
            raise TimeoutError

    def next_within(self, seconds: float) -> bool:
        """Waits for another heartbeat; returns whether it came."""
        with self._news:
            seen = self._count
            self._news.wait_for(lambda: self._ended or self._count > seen, seconds)
            return self._count > seen and not self._ended

    def cancel(self) -> None:
        """Ends the stream."""
        self._stream.cancel()

    def _read(self) -> None:
        try:
            for response in self._stream:
                with self._news:
                    self._first = self._first or response
                    self._count += 1
                    self._news.notify_all()
        except grpc.RpcError as error:
            self._error = error
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()
