"""Transport of the synchronous client: gRPC, raw sockets and copies in shared memory."""

from __future__ import annotations

import time
from typing import Any

import grpc
from google.protobuf.message import Message

from ...cuda.host.memory import tune_malloc
from ...protos.credentials import Credentials
from ...protos.endpoint import client_endpoint
from ..effects import Call, Connect, Copy, Effect, Pull, Push
from ..errors import InvalidRequest, KVTierError, NotConnected, SessionLost, error_from_status
from ..session.connection import ClientIdentity, SessionConnection
from ..session.fork_guard import ForkGuarded, fork_safe
from ..session.session import ClientSession
from ..timeouts import Timeouts
from .grpc_methods import CHANNEL_OPTIONS, RESPONSES, path_of, response_of, serialize
from .socket_connector import SocketConnector

__all__ = ["GrpcTransport"]


class GrpcTransport(ForkGuarded):
    """Performs effects over its own gRPC channel. See `effects.Transport`."""

    def __init__(
        self, endpoint: str | None, identity: ClientIdentity, timeouts: Timeouts, credentials: Credentials | None
    ) -> None:
        tune_malloc()
        try:
            server = client_endpoint(endpoint)
            credentials = credentials or Credentials.from_environment()
            self._channel = fork_safe(credentials.channel(server, CHANNEL_OPTIONS))
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        self._calls = {
            method: self._channel.unary_unary(path_of(method), serialize, response.FromString)
            for method, response in RESPONSES.items()
        }
        self._sockets = SocketConnector(self._channel, server, credentials, enabled=identity.transport != "grpc")
        self._connection = SessionConnection(self._channel, server, identity, timeouts.call, credentials)
        self._closed = False

    @property
    def session(self) -> ClientSession | None:
        return None if self.is_forked else self._connection.session

    def forked(self) -> None:
        self._connection.forked()

    def invalidate(self, session: ClientSession) -> None:
        self.check_process()
        self._connection.invalidate(session)

    def withdraw(self, session: ClientSession, grant_id: int) -> None:
        if not self.is_forked:
            self._connection.withdraw(session, grant_id)

    def perform(self, effect: Effect) -> Any:
        self.check_process()
        try:
            return self._perform(effect)
        except SessionLost as error:
            raise self._translated(error) from None
        except grpc.RpcError as error:
            raise self._translated(
                error_from_status(error.code(), error.details(), error.trailing_metadata())
            ) from None
        except grpc.FutureCancelledError:
            raise self._translated(SessionLost("the session has ended")) from None
        except ValueError:
            if self._closed:  # raised by gRPC for a closed channel
                raise NotConnected("the client is closed") from None
            raise

    def _translated(self, error: KVTierError) -> KVTierError:
        """After `close`, replaces `SessionLost` by `NotConnected`, because the caller closed it."""
        return NotConnected("the client is closed") if self._closed and isinstance(error, SessionLost) else error

    def _perform(self, effect: Effect) -> Any:
        match effect:
            case Connect(timeout, patient):
                session = self._connection.wait(timeout, patient=patient)
                self._sockets.search(session)  # starts the search for the socket
                return session
            case Call(method, request, timeout):
                return self._call(method, request, timeout)
            case Push(session):
                return self._sockets.stream(session, lambda streams: streams.push(effect))
            case Pull(session):
                self._sockets.stream(session, lambda streams: streams.pull(effect))
            case Copy(run):
                run()
        return None

    def _call(self, method: str, request: Message, timeout: float) -> Any:
        session, deadline = self._connection.session, time.monotonic() + timeout
        if session is not None and session.calls is not None:
            answer = session.calls.call(method, serialize(request), timeout)
            if answer is not None:
                return response_of(method, answer)
        # The attempt to connect to the socket has taken a part of the time.
        return self._calls[method](request, timeout=max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        if self.is_forked:
            return
        self._closed = True
        self._connection.close()
        self._sockets.close()
        self._channel.close()
