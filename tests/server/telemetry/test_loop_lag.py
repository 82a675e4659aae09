"""Recent delay of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time

from harness.polling import async_wait_until

from kvtier.server.telemetry.loop_lag import LoopLag, watch_loop


def test_the_worst_of_the_last_seconds() -> None:
    """A late wake-up counts for five seconds, then the worst of those after it."""
    clock = [0.0]
    lateness = LoopLag(lambda: clock[0])
    assert lateness.worst == 0
    for late in (0.1, 0.5, 0.2, 0.3):
        lateness.observe(late)
        clock[0] += 1
    assert lateness.worst == 0.5
    clock[0] = 6.5
    assert lateness.worst == 0.3
    lateness.observe(0.01)
    clock[0] = 9
    assert lateness.worst == 0.01
    clock[0] = 20
    assert lateness.worst == 0


async def test_a_blocked_loop_is_reported() -> None:
    """Blocking work on the loop raises the reported delay."""
    lateness, seen = LoopLag(), list[float]()
    watch = asyncio.get_running_loop().create_task(watch_loop(seen.append, lateness.observe))
    await async_wait_until(lambda: bool(seen))
    time.sleep(0.3)  # noqa: ASYNC251 - that is what is to be seen
    await async_wait_until(lambda: max(seen) > 0.1)
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    assert lateness.worst == max(seen) > 0.1
