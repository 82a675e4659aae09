"""How much a tenant may ask for: calls and bytes in a second, and sessions at once. Lives on the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from ..config.schema import RateConfig
from ..refused import Refused

__all__ = ["RateLimiter", "RateLimiters"]

_BURST_SECONDS = 10.0
_SWEEP_METERS = 1024
_GIVEN_BACK = 1024
"""So many calls that give something back are let through beyond what a tenant has: what it was granted would stay out of use."""


class _TokenBucket:
    """Fills at a rate, up to ten seconds' worth. It may be overdrawn; who finds it empty waits."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._most = max(rate * _BURST_SECONDS, 1.0)
        self._level = self._most
        self._at = now

    def wait(self, now: float) -> float:
        """Returns in how many seconds there is something; 0 for now."""
        self._fill(now)
        return max(0.0, (1.0 - self._level) / self._rate)

    def take(self, amount: float, now: float) -> None:
        """Takes so much, also more than there is."""
        self._fill(now)
        self._level -= amount

    def owes(self, now: float) -> float:
        """Returns how much more was taken than there was."""
        self._fill(now)
        return max(0.0, -self._level)

    def is_full(self, now: float) -> bool:
        """Returns whether nothing is known of what was taken."""
        self._fill(now)
        return self._level >= self._most

    def _fill(self, now: float) -> None:
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now


class RateLimiter:
    """One tenant's."""

    def __init__(self, tenant: str, rates: RateConfig, clock: Callable[[], float]) -> None:
        self.sessions = 0
        self._tenant = tenant
        self._rates = rates
        self._clock = clock
        now = clock()
        self._calls = _TokenBucket(rates.calls, now) if rates.calls is not None else None
        self._bytes = _TokenBucket(rates.bytes, now) if rates.bytes is not None else None

    def opens(self) -> None:
        """Takes note of a session, and of the call that opens it. Raises Refused for one too many, of either."""
        if self._rates.sessions is not None and self.sessions >= self._rates.sessions:
            raise Refused("LIMIT_EXCEEDED", f"{self.sessions} sessions of tenant {self._tenant!r} are open already")
        self.call()
        self.sessions += 1

    def closes(self) -> None:
        """Takes note of the end of a session."""
        self.sessions -= 1

    def call(self, *, gives_back: bool = False) -> None:
        """Takes note of a call. Raises Refused for one too many, unless it `gives_back` what was granted: that is owed."""
        if self._calls is not None:
            if not gives_back or self._calls.owes(self._clock()) >= _GIVEN_BACK:
                self._check(self._calls, "calls")
            self._calls.take(1.0, self._clock())

    def stream(self) -> None:
        """Raises Refused if no stream may begin now: those before have moved more than was free."""
        if self._bytes is not None:
            self._check(self._bytes, "bytes")

    def moved(self, nbytes: int) -> None:
        """Takes note of bytes that a stream has moved."""
        if self._bytes is not None:
            self._bytes.take(nbytes, self._clock())

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be lost with it."""
        now = self._clock()
        return not self.sessions and all(b is None or b.is_full(now) for b in (self._calls, self._bytes))

    def _check(self, bucket: _TokenBucket, what: str) -> None:
        wait = bucket.wait(self._clock())
        if wait > 0:
            text = f"tenant {self._tenant!r} has used up its {what}; try again in {wait:.2f} s"
            raise Refused("RATE_LIMITED", text, retry_after=wait)


class RateLimiters:
    """The meters of those tenants that have any bound."""

    def __init__(
        self, rates: RateConfig, of_tenants: Mapping[str, RateConfig], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`rates` are of each tenant, as far as `of_tenants` does not say otherwise."""
        self._rates = rates
        self._of_tenants = {name: _merged(rates, own) for name, own in of_tenants.items()}
        self._clock = clock
        self._meters: dict[str, RateLimiter] = {}

    def of(self, tenant: str) -> RateLimiter | None:
        """Returns a tenant's meter; None where there is no bound."""
        rates = self._of_tenants.get(tenant, self._rates)
        if rates == RateConfig():
            return None
        meter = self._meters.get(tenant)
        if meter is None:
            if len(self._meters) >= _SWEEP_METERS:
                self._meters = {name: meter for name, meter in self._meters.items() if not meter.is_idle}
            meter = self._meters[tenant] = RateLimiter(tenant, rates, self._clock)
        return meter


def _merged(rates: RateConfig, own: RateConfig) -> RateConfig:
    given = {name: value for name, value in msgspec.structs.asdict(own).items() if value is not None}
    return msgspec.structs.replace(rates, **given)
