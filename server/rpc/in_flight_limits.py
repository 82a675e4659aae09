"""Limits of calls: requests received at the same time, memory of running calls, and streams.

gRPC buffers each request until it is complete. It has no limit for the memory of all incomplete
requests, and no time limit. But gRPC receives only the first 64 KiB of a request until its call
asks for the message. So calls wait here before they ask. The server authenticates a caller before
its call waits here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import grpc

from ..refused import Refused

__all__ = [
    "LOCAL_OR_REMOTE",
    "PUBLIC",
    "GrpcCaller",
    "InFlightLimiter",
    "InFlightLimits",
    "MessageBudget",
    "RefusalPace",
    "RunningRequests",
    "StreamShares",
]

_MAX_WAITING = 256
"""Maximum number of calls of one group that wait. gRPC holds up to 64 KiB of each."""
_MAX_ALL_WAITING = 1024
_CALL_BYTES = 4096
"""Memory of a running call besides its request: 2 to 4 KiB."""
_REFUSALS_PER_SECOND = 200.0
_REFUSAL_BURST = 50
_REFUSAL_SECONDS = 2.0
"""Maximum delay of a refusal."""
_MAX_HELD = 4096
"""Maximum number of refusals that wait. Further ones are sent at once."""


class GrpcCaller(NamedTuple):
    """Caller of a call over gRPC. Limits apply to the group; its connections take turns."""

    group: str
    """Tenant of the credentials, or their name, or the address of a caller without credentials."""
    connection: str


class InFlightLimits(NamedTuple):
    """Limits of one `InFlightLimiter`. A further group always finds a place while one is free."""

    places: int
    """A group gets a place only if it has fewer than are free: the first one half of them."""
    request_seconds: float
    """Maximum time for a request to arrive."""
    share: int
    """A group with more requests in flight than this gives way to other calls early."""
    patience_seconds: float
    """If another call waits for its place, a request that has taken longer is ended, if its group
    has more than `share` of them."""
    long_patience_seconds: float
    """The same for other groups."""


LOCAL_OR_REMOTE = InFlightLimits(32, 30.0, 4, 0.25, 8.0)
"""Limits of calls over the Unix socket, and of calls over TCP. 30 s as for the socket protocol.
Four requests of 16 MiB take 5.4 s at 100 Mbit/s."""
PUBLIC = InFlightLimits(16, 5.0, 0, 0.05, 0.05)
"""Limits of calls that need no credentials. The request of a health check is a few bytes, which
arrive together with its headers."""


class _InFlight(NamedTuple):
    caller: GrpcCaller
    began_at: float
    timeout: asyncio.Timeout


class InFlightLimiter:
    """Receives the requests of gRPC calls. Runs on the event loop."""

    def __init__(self, limits: InFlightLimits = LOCAL_OR_REMOTE) -> None:
        self._limits = limits
        self._running: dict[object, _InFlight] = {}
        """The requests in flight, the oldest first."""
        self._counts: Counter[str] = Counter()
        """Number of requests in flight per group, and per connection."""
        self._waiting: dict[str, dict[asyncio.Future[None], str]] = {}
        """Waiting calls of each group, with their connections, the oldest first."""

    async def receive(
        self,
        context: grpc.aio.ServicerContext,
        caller: GrpcCaller,
        running: RunningRequests | None = None,
        counted: contextlib.ExitStack | None = None,
    ) -> bytes:
        """Returns the request of a call. Raises `Refused` on a time-out.

        gRPC frees the received part of the request when the call is aborted. With `running` the
        call keeps its place until the request fits, and `counted` ends its count.
        """
        while not self._has_room(caller.group):
            self._end_oldest(caller.group)
            await self._wait(caller)
        key = object()
        self._counts.update(caller)
        try:
            async with asyncio.timeout(self._limits.request_seconds) as timeout:
                self._running[key] = _InFlight(caller, asyncio.get_running_loop().time(), timeout)
                message = await context.read()
                if running is not None and counted is not None and isinstance(message, bytes):
                    counted.enter_context(await running.count(caller.group, len(message)))
        except TimeoutError:
            raise Refused(
                "LIMIT_EXCEEDED", "the request did not arrive, or found no memory beside others, in time"
            ) from None
        finally:
            del self._running[key]
            for name in caller:
                self._counts[name] -= 1
                if not self._counts[name]:
                    del self._counts[name]
            self._wake()
        if not isinstance(message, bytes):  # `grpc.aio.EOF`: the call has no request
            raise Refused("INVALID_ARGUMENT", "the call has no request")
        return bytes(message)

    async def _wait(self, caller: GrpcCaller) -> None:
        """Waits for a place, or for the time after which a request may be ended."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller.group, {})[future] = caller.connection
        self._drop_excess(caller.group)
        try:
            # Not `wait_for`, which in Python 3.11 ignores a cancellation if the future is done.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.patience_seconds):
                    await future
        except asyncio.CancelledError:
            self._wake()  # another call gets the place
            raise
        finally:
            self._remove(caller.group, future)

    def _remove(self, group: str, future: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(group)
        if waiting is not None:
            waiting.pop(future, None)
            if not waiting:
                del self._waiting[group]

    def _drop_excess(self, group: str) -> None:
        """Refuses a waiting call if a group, or all of them, have too many."""
        if sum(map(len, self._waiting.values())) > _MAX_ALL_WAITING:
            group = max(self._waiting, key=lambda each: len(self._waiting[each]))
        elif len(self._waiting[group]) <= _MAX_WAITING:
            return
        # At random: a flood of calls must not be able to choose the call that is refused.
        future = random.choice([*self._waiting[group]])  # noqa: S311 - fairness, not a secret
        self._remove(group, future)
        if not future.done():
            future.set_exception(Refused("LIMIT_EXCEEDED", "too many calls wait for their request to be received"))

    def _wake(self) -> None:
        """Gives a place to the group, and there to the connection, with the fewest requests."""
        groups = [group for group in self._waiting if self._has_room(group)]
        if not groups:
            return
        waiting = self._waiting[min(reversed(groups), key=self._counts.__getitem__)]
        futures = [future for future in reversed(waiting) if not future.done()]
        if not futures:
            return
        fewest = min(self._counts[waiting[future]] for future in futures)
        futures = [future for future in futures if self._counts[waiting[future]] == fewest]
        # The latest, because a caller within the limits does not wait behind many calls. But not
        # always, because a flood of calls always has the latest.
        random.choice((futures[0], random.choice(futures))).set_result(None)  # noqa: S311 - fairness, not a secret

    def _has_room(self, group: str) -> bool:
        return self._counts[group] < self._limits.places - len(self._running)

    def _end_oldest(self, group: str) -> None:
        """Ends the oldest request in the way of a group, if it has taken long."""
        limits, now = self._limits, asyncio.get_running_loop().time()
        for request in self._running.values():
            if request.began_at > now - limits.patience_seconds:
                return
            other = request.caller.group
            is_early = self._counts[other] > limits.share
            if request.began_at > now - (limits.patience_seconds if is_early else limits.long_patience_seconds):
                continue
            is_in_the_way = other == group or self._counts[other] > self._counts[group]
            if is_in_the_way and not request.timeout.expired():
                request.timeout.reschedule(now)
                return


class RunningRequests:
    """Memory of the requests of running calls. Runs on the event loop.

    Without this limit, calls that wait for their turn or for blocks pile up. A call of 65,536 keys
    takes up to 25 MiB, and a client can make 256 of them on each connection.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._used: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}

    async def count(self, group: str, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """Waits until a request fits; returns a context whose end frees its bytes.

        A group gets at most as many bytes as are then free, so others find some.
        """
        nbytes = min(nbytes + _CALL_BYTES, self._most)
        while not self._fits(group, nbytes):
            future = asyncio.get_running_loop().create_future()
            self._waiting[future] = group, nbytes
            try:
                await future
            finally:
                self._waiting.pop(future, None)
        self._used[group] += nbytes
        return self._counted(group, nbytes)

    @contextlib.contextmanager
    def _counted(self, group: str, nbytes: int) -> Iterator[None]:
        try:
            yield
        finally:
            self._used[group] -= nbytes
            if not self._used[group]:
                del self._used[group]
            for future, (waiting, wanted) in self._waiting.items():
                if self._fits(waiting, wanted) and not future.done():
                    future.set_result(None)

    def _fits(self, group: str, nbytes: int) -> bool:
        free = self._most - self._used.total()
        return nbytes <= free and (not self._used[group] or self._used[group] + nbytes <= free)


class StreamShares:
    """Number of running streams of a method, per group of callers. Runs on the event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._streams: Counter[str] = Counter()

    @contextlib.contextmanager
    def counting(self, group: str) -> Iterator[None]:
        """Counts a stream while it runs. Raises `Refused` if the group has too many.

        A group gets at most as many as are then free, so others find some.
        """
        if self._streams[group] >= self._most - self._streams.total():
            raise Refused("LIMIT_EXCEEDED", f"too many streams of this call: {self._streams[group]} of the caller")
        self._streams[group] += 1
        try:
            yield
        finally:
            self._streams[group] -= 1
            if not self._streams[group]:
                del self._streams[group]


class RefusalPace:
    """Rate limit of refusals for callers without valid credentials. Runs on the event loop.

    A caller cannot have more than `grpc.max_concurrent_streams` calls on a connection. So delayed
    refusals slow it down. 128 calls at a time that were refused at once left 2 % of the calls of an
    honest client.
    """

    def __init__(self) -> None:
        self._next = 0.0
        self._held = 0

    async def wait(self) -> None:
        if self._held >= _MAX_HELD:
            return
        now = asyncio.get_running_loop().time()
        turn = max(self._next, now - _REFUSAL_BURST / _REFUSALS_PER_SECOND)
        # Calls that are cancelled while they wait have taken turns, so the delay has a limit.
        turn = min(turn, now + _REFUSAL_SECONDS)
        self._next = turn + 1 / _REFUSALS_PER_SECOND
        if turn <= now:
            return
        self._held += 1
        try:
            await asyncio.sleep(turn - now)
        finally:
            self._held -= 1


class _Reader(Protocol):
    def resume(self) -> None:
        """Reads again, because memory may have become free."""
        ...


class MessageBudget:
    """Memory for requests of more than 64 KiB, from their first byte to the end of their call.

    A connection whose request does not fit waits: the server does not read from it. A tenant may
    reserve half of the budget, and a session an eighth, but at least one request.
    """

    def __init__(self, total_bytes: int) -> None:
        self._free = total_bytes
        self._per_session = total_bytes // 8
        self._per_tenant = total_bytes // 2
        self._reserved: Counter[bytes | str | None] = Counter()
        """By session id, and by tenant."""
        self._waiting: dict[_Reader, None] = {}

    def reserve(self, session_id: bytes, tenant: str | None, nbytes: int, connection: _Reader) -> bool:
        """Returns whether memory could be reserved. If not, calls `connection.resume` later.

        `tenant` is None if the caller may access all tenants.
        """
        before = self._reserved[session_id]
        if (
            nbytes > self._free
            or (before and before + nbytes > self._per_session)
            or self._reserved[tenant] + nbytes > self._per_tenant
        ):
            self._waiting[connection] = None
            return False
        self._waiting.pop(connection, None)
        self._free -= nbytes
        self._reserved[session_id] += nbytes
        self._reserved[tenant] += nbytes
        return True

    def release(self, session_id: bytes, tenant: str | None, nbytes: int, connection: _Reader) -> None:
        self._waiting.pop(connection, None)
        self._free += nbytes
        for owner in (session_id, tenant):
            self._reserved[owner] -= nbytes
            if self._reserved[owner] <= 0:
                del self._reserved[owner]
        for each in self._waiting if nbytes else ():
            asyncio.get_running_loop().call_soon(each.resume)
