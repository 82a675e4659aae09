"""Rate limits per tenant: calls and bytes per second, open sessions. For the event loop only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from ..config.schema import RateConfig
from ..refused import Refused

__all__ = ["RateLimiter", "RateLimiters"]

_BURST_SECONDS = 10.0
_MAX_LIMITERS = 1024
"""Number of limiters at which idle limiters are dropped."""
_MAX_OVERDRAFT = 1024
"""Maximum number of calls above the limit that are accepted because they release slots or pins."""


class _TokenBucket:
    """Token bucket that holds the tokens of ten seconds. Its level can be negative (overdrawn)."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._capacity = max(rate * _BURST_SECONDS, 1.0)
        self._level = self._capacity
        self._at = now

    def seconds_to_wait(self, now: float) -> float:
        self._fill(now)
        return max(0.0, (1.0 - self._level) / self._rate)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def overdraft(self, now: float) -> float:
        self._fill(now)
        return max(0.0, -self._level)

    def is_full(self, now: float) -> bool:
        self._fill(now)
        return self._level >= self._capacity

    def _fill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now


class RateLimiter:
    def __init__(self, tenant: str, rates: RateConfig, clock: Callable[[], float]) -> None:
        self.sessions = 0
        self._tenant = tenant
        self._rates = rates
        self._clock = clock
        now = clock()
        self._calls = _TokenBucket(rates.calls, now) if rates.calls is not None else None
        self._bytes = _TokenBucket(rates.bytes, now) if rates.bytes is not None else None

    def open_session(self) -> None:
        """Counts a session and the call that opens the session. Raises `Refused` above a limit."""
        if self._rates.sessions is not None and self.sessions >= self._rates.sessions:
            raise Refused("LIMIT_EXCEEDED", f"{self.sessions} sessions of tenant {self._tenant!r} are open already")
        self.count_call()
        self.sessions += 1

    def close_session(self) -> None:
        self.sessions -= 1

    def count_call(self, *, is_release: bool = False) -> None:
        """Counts a call. Raises `Refused` above the limit.

        `is_release`: the call releases slots or pins. They would stay in use if the call were
        refused, so up to `_MAX_OVERDRAFT` of these calls are accepted above the limit.
        """
        if self._calls is not None:
            if not is_release or self._calls.overdraft(self._clock()) >= _MAX_OVERDRAFT:
                self._check(self._calls, "calls")
            self._calls.take(1.0, self._clock())

    def check_call(self) -> None:
        """Raises `Refused` if the next call would be above the limit. Counts no call."""
        if self._calls is not None:
            self._check(self._calls, "calls")

    def check_stream(self) -> None:
        """Raises `Refused` if earlier streams have used up the tenant's bytes."""
        if self._bytes is not None:
            self._check(self._bytes, "bytes")

    def count_bytes(self, nbytes: int) -> None:
        if self._bytes is not None:
            self._bytes.take(nbytes, self._clock())

    @property
    def is_idle(self) -> bool:
        """Whether the limiter is in the state of a new limiter, so that it can be dropped."""
        now = self._clock()
        return not self.sessions and all(b is None or b.is_full(now) for b in (self._calls, self._bytes))

    def _check(self, bucket: _TokenBucket, what: str) -> None:
        wait = bucket.seconds_to_wait(self._clock())
        if wait > 0:
            text = f"tenant {self._tenant!r} has used up its {what}; try again in {wait:.2f} s"
            raise Refused("RATE_LIMITED", text, retry_after=wait)


class RateLimiters:
    """Rate limiters of the tenants that have a limit."""

    def __init__(
        self, rates: RateConfig, of_tenants: Mapping[str, RateConfig], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`rates` apply to each tenant, except values that `of_tenants` has for the tenant."""
        self._rates = rates
        self._of_tenants = {name: _merged(rates, own) for name, own in of_tenants.items()}
        self._clock = clock
        self._limiters: dict[str, RateLimiter] = {}

    def for_tenant(self, tenant: str) -> RateLimiter | None:
        rates = self._of_tenants.get(tenant, self._rates)
        if rates == RateConfig():
            return None
        limiter = self._limiters.get(tenant)
        if limiter is None:
            if len(self._limiters) >= _MAX_LIMITERS:
                self._limiters = {name: limiter for name, limiter in self._limiters.items() if not limiter.is_idle}
            limiter = self._limiters[tenant] = RateLimiter(tenant, rates, self._clock)
        return limiter


def _merged(rates: RateConfig, own: RateConfig) -> RateConfig:
    given = {name: value for name, value in msgspec.structs.asdict(own).items() if value is not None}
    return msgspec.structs.replace(rates, **given)
