"""Calls to the server about requests and resets, made on background threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Unpack

from .... import Client, KVTierError, Lease, LeaseOptions
from ...failures import Unsupported
from ..background import BackgroundThreads, Circuit, RateLimitedLog, logger
from ..peers import ServerLink
from .requests import RequestRegistration

__all__ = ["CacheReset", "RequestCalls"]

# The first call may report the end of another engine's reset, which may have begun before this
# engine's last store. Only a second call is certain to empty the tier after that store.
_RESET_ROUNDS = 2
_RESET_WAIT_S = 1.0
_RESET_RETRY_S = 1.0


class RequestCalls:
    """Registers requests at the server, and ends each request when its last call has ended.

    Public methods run on the scheduler's thread, unless the docstring says "Thread-safe".
    """

    def __init__(self, client: Client, log: RateLimitedLog) -> None:
        self._client = client
        self._log = log
        self._lock = threading.Lock()
        self.circuit = Circuit()
        # A separate thread, so that releases do not queue behind lookups that wait for promotions.
        self._control_thread = BackgroundThreads("release", log)

    def reachable(self) -> bool:
        """Whether the server can be called now. Warns if no server is connected. Thread-safe."""
        if not self._client.connected:
            self._log.warn(
                "disconnected", "no kvtier server is connected; requests are computed as if nothing were cached"
            )
            return False
        return not self.circuit.is_open

    def register(self, request: RequestRegistration) -> None:
        """Registers a request that is not looked up, so that tiers can vote on it (B1.1)."""
        if self._client.connected and not self.circuit.is_open:
            self.acquire(request)
            request.voting = True
            self._control_thread.submit(lambda: self._register(request))

    def acquire(self, request: RequestRegistration) -> None:
        """Records that a call about the request begins. Call `release` when the call has ended."""
        with self._lock:
            request.pending += 1

    def release(self, request: RequestRegistration) -> None:
        """Records that a call about the request has ended. Thread-safe."""
        with self._lock:
            request.pending -= 1
            finish = request.ended and request.pending == 0
        if finish:
            self._submit_finish(request)

    def finish_request(self, request: RequestRegistration) -> None:
        """Ends the request at the server as soon as no call about the request is in flight."""
        with self._lock:
            request.ended = True
            finish = request.pending == 0
        if finish:
            self._submit_finish(request)

    def release_leases(self, leases: Sequence[Lease]) -> None:
        """Releases leases in the background. Thread-safe."""
        for lease in leases:
            self._control_thread.submit(lease.release)

    def use(self, client: Client) -> None:
        """Makes all later calls with another client, because the namespace has changed."""
        self._client = client

    def close(self) -> None:
        self._control_thread.close(1.0)

    def _submit_finish(self, request: RequestRegistration) -> None:
        if self._client.connected:
            self._control_thread.submit(lambda: self._finish(request.request_id))

    # ---- on background threads

    def lookup_keys(
        self, request: RequestRegistration, keys: Sequence[bytes], **options: Unpack[LeaseOptions]
    ) -> Lease:
        """Looks up keys. The first call for a request also registers the request.

        Adds the options that the request's settings have. Raises KVTierError.
        """
        options = {**options, **request.lookup_options(), "slots": True}
        with self._lock:
            first, request.registered = not request.registered, True
        if not first:
            return self._client.lookup(keys, request_id=request.request_id, **options)
        try:
            lease = self._client.begin_request(
                request.request_id,
                keys,
                **request.begin_options(options),
            )
        except KVTierError:
            request.registered = False
            raise
        request.policy = lease.policy
        logger.debug("kvtier: request %s: %s, votes %s", request.request_id, lease.policy, lease.votes)
        return lease

    def _register(self, request: RequestRegistration) -> None:
        client = self._client
        try:
            if not request.registered:
                self.lookup_keys(request, ())
        except KVTierError as error:
            if client is self._client:
                self.circuit.open(error)
            self._log.warn("register", f"could not register a request: {error}")
        finally:
            request.voting = False
            self.release(request)

    def _finish(self, request_id: str) -> None:
        try:
            self._client.finish_request(request_id)
        except KVTierError as error:
            self._log.warn("finish", f"could not end a request: {error}")


class CacheReset:
    """Reset of the cache, retried until it succeeds.

    Public methods run on the scheduler's thread. Only `close` blocks.
    """

    def __init__(self, log: RateLimitedLog) -> None:
        self._log = log
        self._threads = BackgroundThreads("reset", log)
        self._closed = threading.Event()
        # Numbers of the latest reset: started, ended, reported by `take_done`. Only the background
        # thread writes `_done`.
        self._started = self._done = self._taken = 0
        self._links: deque[ServerLink] = deque()

    def empty(self, client: Client) -> None:
        """Starts to empty the CPU tier. This engine's own saves must have ended before."""
        self._start(lambda: self._empty(client))

    def renew(self, connect: Callable[[], ServerLink], retire: Client | None) -> None:
        """Starts to connect in another namespace, and to retire the namespace of `retire`.

        If `connect` raises Unsupported or OSError, the namespace cannot be known. The reset then
        never ends.
        """
        self._start(lambda: self._renew(connect, retire))

    def supersede(self) -> None:
        """Makes all resets so far count as not ended, and drops those that have not begun."""
        self._started += 1

    def take_done(self) -> bool:
        """Whether the latest reset has ended since the last call of this method."""
        done = self._done == self._started != self._taken
        if done:
            self._taken = self._started
        return done

    def take_link(self, old: Callable[[], None]) -> ServerLink | None:
        """Returns the link of the latest reset if it made one, and closes the other links.

        `old` closes the link that the returned link replaces. It is called in the background.
        """
        link = self._links.pop() if self._links else None
        for close in [*(unused.close for unused in self._links), *([old] if link is not None else [])]:
            self._threads.submit(close)
        self._links.clear()
        return link

    def close(self) -> None:
        self._closed.set()
        self._threads.close(0.5)
        while self._links:
            self._links.pop().close()

    def _start(self, work: Callable[[], None]) -> None:
        self._started = number = self._started + 1
        self._threads.submit(lambda: self._run(number, work))

    def _run(self, number: int, work: Callable[[], None]) -> None:
        # A later reset replaces one that has not begun: users repeat a reset until it succeeds.
        while number == self._started and not self._closed.is_set():
            try:
                work()
                break
            except (Unsupported, OSError) as reason:
                self._log.warn("identity", f"the connector is disabled, every request is a miss: {reason}")
                return
            except Exception as error:  # noqa: BLE001 - no lookup may find stale blocks
                self._log.warn("reset", f"a reset failed; every request is a miss until the reset succeeds: {error!r}")
                self._closed.wait(_RESET_RETRY_S)
        self._done = number

    def _empty(self, client: Client) -> None:
        rounds = _RESET_ROUNDS
        while rounds and not self._closed.is_set():
            rounds -= client.reset(wait=_RESET_WAIT_S) == 0

    def _renew(self, connect: Callable[[], ServerLink], retire: Client | None) -> None:
        link = connect()
        self._links.append(link)
        if self._closed.is_set():  # perhaps after `close` has closed the links
            link.close()
            return
        if retire is not None:
            # If this fails, the blocks are evicted later. This engine does not find them.
            with suppress(KVTierError):
                retire.reset(retire=True)
        with suppress(KVTierError):
            link.client.wait_until_connected(_RESET_WAIT_S)
