"""Scheduler of the event loop's time: tenants take turns, and so do the sessions of a tenant.

All calls share the event loop. The scheduler measures for how long each call uses it, in short
calls and in the slices of long calls. A call with 65,536 keys takes 20 to 400 ms, so its handler
processes the keys in slices of about 1 ms and waits for a turn before each slice.

While other tenants call, the tenant with the most use may use half of the time: the loop then stays
free for as long as this tenant has used it. The same applies to the sessions of a tenant. So a
short call of another client starts at once. Requests above this share wait: the tenant with the
least use is next, then its session with the least use, then the oldest request. While no other
tenant and no other session calls, a session gets all of the time.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

from ...tiers.types import EngineSession

__all__ = ["GRPC_SECONDS", "Account", "SliceScheduler", "slices_of"]

T = TypeVar("T")
S = TypeVar("S", bound="_Share")

GRPC_SECONDS = 0.0002
"""Use of the event loop by gRPC itself, for a call or for a message of a stream."""
_TURN_SECONDS = 0.0005
"""Short slices and short calls share a turn of the loop for so long."""
_BURST_SECONDS = 0.0005
"""A tenant or session above its share waits if it is ahead by more than this."""
_ACTIVE_SECONDS = 0.05
"""For so long after a call, the loop keeps time free for further calls of the session or tenant."""
_PAUSE = 2.0
"""A tenant that has used the loop for a time may use it again after this multiple of the time,
counted from the begin of its use."""
_MOST_SECONDS = 0.25
"""Largest charge for one step. A longer one was interrupted: the machine or the process stopped."""
_MAX_TENANTS = 1024
"""Number of tenants at which those without sessions are dropped."""
_MOST_COMPARED = 64
"""Number of waiting tenants, and of waiting sessions, that are compared for a turn: 25 µs."""
_MAX_DELAYED = 16
"""Maximum number of calls over gRPC per tenant whose refusal is delayed."""


class _Siblings:
    """State that the tenants of a server share, and the sessions of a tenant."""

    __slots__ = ("before_at", "last", "last_at", "most_used", "virtual")

    def __init__(self) -> None:
        self.virtual = 0.0
        """Use of the latest share at the begin of its last turn. New shares begin with it."""
        self.most_used: _Share | None = None
        """The most used of the active shares."""
        self.last: _Share | None = None
        self.last_at = self.before_at = float("-inf")
        """Time of the last use of the loop: by any share, and by any share other than `last`. So
        the last use by others is `before_at` for `last`, and `last_at` for every other share."""


class _Share:
    """Use of the event loop by a tenant, or by a session of a tenant."""

    __slots__ = ("free_at", "siblings", "used", "used_at")

    def __init__(self, siblings: _Siblings) -> None:
        self.siblings = siblings
        self.used = siblings.virtual
        """Used seconds of the loop. A share that returns after a pause begins at its siblings'."""
        self.used_at = float("-inf")
        """Time of the last use."""
        self.free_at = 0.0
        """Time from which on the share may use the loop again although its siblings call."""

    def seconds_to_wait(self, now: float) -> float:
        siblings = self.siblings
        if siblings.most_used is not self:
            return 0.0
        others_at = siblings.before_at if siblings.last is self else siblings.last_at
        return max(0.0, min(self.free_at, others_at + _ACTIVE_SECONDS) - now)

    def charge(self, began: float, seconds: float) -> None:
        siblings, now = self.siblings, began + seconds
        others_at = siblings.before_at if siblings.last is self else siblings.last_at
        self.used = max(self.used, siblings.virtual)
        siblings.virtual = self.used
        self.used += seconds
        # Use while no other share called is not counted, so a first call of another delays nothing.
        counted_from = max(self.free_at, began) if began - others_at < _ACTIVE_SECONDS else began
        self.free_at = counted_from + _PAUSE * seconds
        if siblings.last is not self:
            siblings.before_at, siblings.last = siblings.last_at, self
        siblings.last_at = self.used_at = now
        most = siblings.most_used
        if most is None or self.used >= most.used or now - most.used_at >= _ACTIVE_SECONDS:
            siblings.most_used = self


class _Tenant(_Share):
    __slots__ = ("accounts", "delayed", "sessions", "waiting")

    def __init__(self, siblings: _Siblings) -> None:
        super().__init__(siblings)
        self.sessions = _Siblings()
        self.accounts = 0
        """Number of the tenant's sessions that have an account."""
        self.waiting: dict[Account, None] = {}
        """Accounts with waiting requests."""
        self.delayed = 0
        """Number of calls whose refusal is delayed."""


class Account(_Share):
    """Account of one session, or of all calls of a tenant without a session."""

    __slots__ = ("tenant", "waiting")

    def __init__(self, tenant: _Tenant) -> None:
        super().__init__(tenant.sessions)
        self.tenant = tenant
        self.waiting: deque[Callable[[], bool]] = deque()
        """Waiting requests. A request returns whether its work follows in the next callbacks."""


class _Sessions(Protocol):
    """What the scheduler needs of `SessionRegistry`."""

    def tenant_of(self, session_id: bytes) -> str | None: ...

    def check(self, session: EngineSession) -> None: ...


class SliceScheduler:
    """Grants turns to short calls and to the slices of long calls. Runs on the event loop."""

    def __init__(self, sessions: _Sessions, clock: Callable[[], float] = time.monotonic) -> None:
        self._sessions = sessions
        self._clock = clock
        self._siblings = _Siblings()
        self._tenants: dict[str | None, _Tenant] = {}
        self._accounts: dict[bytes, Account] = {}
        """Accounts of the open sessions, by id."""
        self._others: dict[str | None, Account] = {}
        """Accounts for calls without a session, by tenant."""
        self._waiting: dict[_Tenant, None] = {}
        self._is_granting = False
        self._timer: asyncio.TimerHandle | None = None
        self._grant_at = 0.0
        """Time of the next grant, if `_timer` is set."""
        self._running: Account | None = None
        """Account of the call that uses the loop, if its time is measured."""
        self._slice: tuple[Account, float] | None = None
        """Account and begin of a slice whose task is not measured."""
        self.turns = 0
        """Number of granted turns."""

    def account_of(self, session_id: bytes) -> Account | None:
        """Returns the account of an open session; None if there is no such session."""
        account = self._accounts.get(session_id)
        if account is None and (tenant := self._sessions.tenant_of(session_id)) is not None:
            account = self._accounts[session_id] = Account(self._tenant(tenant))
            account.tenant.accounts += 1
        return account

    def account_without_session(self, tenant: str | None) -> Account:
        """Returns the account of a tenant's calls without a session. None: of unknown callers."""
        account = self._others.get(tenant)
        if account is None:
            account = self._others[tenant] = Account(self._tenant(tenant))
        return account

    def _tenant(self, name: str | None) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= _MAX_TENANTS:
                now = self._clock()
                kept = {n: t for n, t in self._tenants.items() if t.accounts or t.waiting or t.free_at > now}
                self._tenants = kept
                self._others = {n: account for n, account in self._others.items() if n in kept}
            tenant = self._tenants[name] = _Tenant(self._siblings)
        return tenant

    def forget(self, session_id: bytes) -> None:
        """Drops the account of an ended session."""
        account = self._accounts.pop(session_id, None)
        if account is not None:
            account.tenant.accounts -= 1

    def may_run(self, account: Account) -> bool:
        """Returns whether a request may be processed now, without a wait for its turn."""
        if account.waiting:
            return False
        return _wait_of(account, self._clock()) <= _BURST_SECONDS

    def wait(self, account: Account, request: Callable[[], bool]) -> None:
        """Calls `request` when it is the turn of its account."""
        if not account.waiting:
            account.tenant.waiting[account] = None
            self._waiting[account.tenant] = None
        account.waiting.append(request)
        if not self._is_granting:
            self._is_granting = True
            self._grant_later(0.0)
        elif self._timer is not None and (now := self._clock()) + _wait_of(account, now) < self._grant_at:
            self._timer.cancel()
            self._timer = None
            self._grant_later(0.0)

    def run(self, account: Account, work: Callable[..., T], *arguments: Any, before: float = 0.0) -> T:
        """Calls `work` and charges its time to an account, unless the time is measured already.

        `before`: seconds that the event loop has used for this work before the call.
        """
        if self._running is not None:
            return work(*arguments)
        self._running, began = account, self._clock() - before
        try:
            return work(*arguments)
        finally:
            self._running = None
            self.charge(account, began, self._clock() - began)

    @types.coroutine
    def metered(self, account: Account, call: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Awaits a coroutine, and charges to an account for how long it uses the loop."""
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                future = self.run(account, call.send, value) if error is None else self.run(account, call.throw, error)
            except StopIteration as end:
                result: T = end.value
                return result
            value = error = None
            try:
                value = yield future
            except BaseException as raised:  # noqa: BLE001 - the coroutine handles it
                error = raised

    def charge(self, account: Account, began: float, seconds: float) -> None:
        """Charges the use of the loop from `began` on."""
        began, seconds = began + seconds - min(seconds, _MOST_SECONDS), min(seconds, _MOST_SECONDS)
        account.charge(began, seconds)
        account.tenant.charge(began, seconds)

    async def enter(self, account: Account) -> None:
        """Waits until a call may run."""
        if not self.may_run(account):
            await self._turn(account)

    async def pause(self) -> float:
        """Waits until the measured call that runs may run its next slice; see `turn`."""
        running = self._running or self.account_without_session(None)
        await self._turn(running)
        return self._clock() + _TURN_SECONDS

    async def turn(self, session: EngineSession, *, before: float = 0.0) -> float:
        """Waits until a call may run its next slice, up to its next `await`.

        Returns the time, on the clock of `time.monotonic`, until which the call may run further
        short slices in this turn. Raises `Refused` if the session has ended meanwhile. `before`:
        seconds that the event loop has used for this slice before the call.
        """
        account = self._running or self.account_of(session.id) or Account(self._tenant(session.tenant))
        if before:
            self.charge(account, self._clock() - before, before)
        await self._turn(account)
        began = self._clock()
        self._sessions.check(session)
        return began + _TURN_SECONDS

    async def _turn(self, account: Account) -> None:
        future = asyncio.get_running_loop().create_future()
        self.wait(account, lambda: _resolve(future))
        await future
        if self._running is None:
            self._slice = (account, self._clock())

    async def delay_refusal(self, seconds: float) -> None:
        """Delays the refusal of the measured call that runs, unless its tenant has many of them."""
        tenant = self._running.tenant if self._running is not None else None
        if tenant is None or tenant.delayed >= _MAX_DELAYED:
            return
        tenant.delayed += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            tenant.delayed -= 1

    def _grant(self) -> None:
        """Grants turns until `_TURN_SECONDS` have passed, or the next tenant must wait."""
        self._timer, now = None, self._clock()
        if self._slice is not None:
            account, began = self._slice
            self._slice = None
            self.charge(account, began, now - began)
        ends = now + _TURN_SECONDS
        try:
            while self._waiting:
                tenant = _next_of(self._waiting, now)
                account = _next_of(tenant.waiting, now)
                if (seconds := _wait_of(account, now)) > 0:
                    self._grant_later(seconds)
                    return
                follows, now = self._process(account, now)
                if follows or now >= ends:
                    self._grant_later(0.0)  # after the slice
                    return
        except BaseException:
            self._grant_later(0.0)
            raise
        self._is_granting = False

    def _process(self, account: Account, began: float) -> tuple[bool, float]:
        """Processes the oldest request of an account. Returns its result, and the time."""
        request, tenant = account.waiting.popleft(), account.tenant
        # Behind the others, because only the first shares are compared.
        del tenant.waiting[account], self._waiting[tenant]
        if account.waiting:
            tenant.waiting[account] = None
        if tenant.waiting:
            self._waiting[tenant] = None
        self._running = account
        try:
            follows = request()
        finally:
            self._running, now = None, self._clock()
            self.charge(account, began, now - began)
        self.turns += follows
        return follows, now

    def _grant_later(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if seconds > 0:
            self._grant_at = self._clock() + seconds
            self._timer = loop.call_later(seconds, self._grant)
        else:
            loop.call_soon(self._grant)


def _wait_of(account: Account, now: float) -> float:
    """Returns for how many seconds an account and its tenant must leave the loop to others."""
    return max(account.tenant.seconds_to_wait(now), account.seconds_to_wait(now))


def _next_of(shares: dict[S, None], now: float) -> S:
    """Returns the share that may run first; of several that may run now, the least used one."""
    return min(
        islice(shares, _MOST_COMPARED),
        key=lambda share: (share.seconds_to_wait(now), max(share.used, share.siblings.virtual)),
    )


def _resolve(future: asyncio.Future[None]) -> bool:
    if future.done():
        return False  # the call was cancelled
    future.set_result(None)
    return True


def slices_of(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yields the items in slices; all of them at once if there are at most `size`."""
    if len(items) <= size:
        yield items
        return
    for start in range(0, len(items), size):
        yield items[start : start + size]
