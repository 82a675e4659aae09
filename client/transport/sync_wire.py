"""What performs the effects of the synchronous client: gRPC, sockets beside it, and the copies themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from ...cuda.host.memory import tune_malloc
from ...protos.credentials import Credentials
from ...protos.endpoint import client_endpoint
from ..effects import Call, Connect, Copy, Effect, Pull, Push
from ..errors import InvalidRequest, KVTierError, NotConnected, SessionLost, error_from_status
from ..session.connection import ClientIdentity, SessionConnection
from ..session.session import Session
from ..timeouts import Timeouts
from .bulk_connector import AnyStreams, BulkConnector, Streams
from .grpc_methods import CHANNEL_OPTIONS, RESPONSES, path_of, response_of, serialize

__all__ = ["GrpcTransport", "SyncTransport"]


class SyncTransport(Protocol):
    """Carries out effects, and keeps the link. The real one talks gRPC; `testing.FakeServer` has another."""

    @property
    def link(self) -> Session | None:
        """The link, if there is one now."""

    def perform(self, effect: Effect) -> Any:
        """Returns an effect's result. Raises `KVTierError`."""

    def lost(self, link: Session) -> None:
        """Takes note that the server does not know the session of this link any more."""

    def close(self) -> None:
        """Ends the session."""


class GrpcTransport:
    """Performs effects over a channel of its own."""

    def __init__(
        self, endpoint: str | None, identity: ClientIdentity, timeouts: Timeouts, credentials: Credentials | None
    ) -> None:
        tune_malloc()
        try:
            server = client_endpoint(endpoint)
            credentials = credentials or Credentials.from_environment()
            self._channel = credentials.channel(server, CHANNEL_OPTIONS)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        self._calls = {
            method: self._channel.unary_unary(path_of(method), serialize, response.FromString)
            for method, response in RESPONSES.items()
        }
        self._streams = Streams(self._channel)
        self._bulk = BulkConnector(self._channel, server, credentials, plain=identity.transport != "grpc")
        self._keeper = SessionConnection(self._channel, identity, timeouts.call)
        self._closed = False

    @property
    def link(self) -> Session | None:
        """See Wire."""
        return self._keeper.link

    def lost(self, link: Session) -> None:
        """See Wire."""
        self._keeper.lost(link)

    def perform(self, effect: Effect) -> Any:
        """See Wire."""
        try:
            return self._do(effect)
        except SessionLost as error:
            raise self._said(error) from None
        except grpc.RpcError as error:
            raise self._said(error_from_status(error.code(), error.details(), error.trailing_metadata())) from None
        except grpc.FutureCancelledError:
            raise self._said(SessionLost("the session has ended")) from None
        except ValueError:
            if self._closed:  # gRPC's way to say so
                raise NotConnected("the client is closed") from None
            raise

    def _said(self, error: KVTierError) -> KVTierError:
        """Returns what the caller is told: that the session has ended says nothing to whoever has closed the client."""
        return NotConnected("the client is closed") if self._closed and isinstance(error, SessionLost) else error

    def _do(self, effect: Effect) -> Any:
        match effect:
            case Connect(timeout, patient):
                link = self._keeper.wait(timeout, patient=patient)
                self._bulk.streams(link)  # looked for now, it is there when it is needed
                return link
            case Call(method, request, timeout):
                return self._call(method, request, timeout)
            case Push(link):
                return self._stream(link, lambda streams: streams.push(effect))
            case Pull(link):
                self._stream(link, lambda streams: streams.pull(effect))
            case Copy(run):
                run()
        return None

    def _call(self, method: str, request: Message, timeout: float) -> Any:
        link = self._keeper.link
        if link is not None and link.calls is not None:
            answer = link.calls.call(method, serialize(request), timeout)
            if answer is not None:
                return response_of(method, answer)
        return self._calls[method](request, timeout=timeout)

    def _stream(self, link: Session, move: Callable[[AnyStreams], Any]) -> Any:
        bulk = self._bulk.streams(link)
        if bulk is None:
            return move(self._streams)
        with self._bulk.watching(bulk):
            return move(bulk)

    def close(self) -> None:
        """See Wire."""
        self._closed = True
        self._keeper.close()
        self._bulk.close()
        self._channel.close()
