"""Online fsck: checks the tiers of a running server in small steps, in parallel to their jobs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...tiers.secondary_tier import NamespaceId, TierError
from ...tiers.storage.fsck import Finding, Slice, check
from ...tiers.types import NAMESPACE_BYTES
from ..core_runtime import TierRuntime
from ..refused import Refused
from ..rpc.sessions import SessionRegistry
from ..telemetry.logs import get_logger
from ..tier_host.guard import CheckedTier

__all__ = ["OnlineFsck", "Progress"]

_log = get_logger(__name__)

_REST = 2.0
"""After each step, and between two checks, the server rests for this multiple of the time that they
took. Four threads that checked without a pause left an honest client a quarter of its steps."""
_MAX_REST_SECONDS = 1.0
"""Longest rest between two checks."""
_HOLD_BACK_SECONDS = 1.0
"""Delay of the refusal while another check runs."""


@dataclass(slots=True)
class Progress:
    """Progress of the check of one tier: `blocks` of `total` blocks are checked."""

    tier: CheckedTier
    total: int = 0
    blocks: int = 0
    nbytes: int = 0
    findings: tuple[Finding, ...] = ()
    """Findings of the last step."""
    done: bool = False
    note: str = ""
    """Why there is nothing to check."""
    error: str = ""
    """Why the check stopped early."""


class OnlineFsck:
    """Online fsck of one server: runs at most one check at a time, on the event loop."""

    def __init__(self, runtime: TierRuntime, sessions: SessionRegistry) -> None:
        self._runtime = runtime
        self._sessions = sessions
        self._running = False
        self._rests_until = 0.0
        """Time at which the next check may begin."""

    async def run(self, names: Sequence[str], *, repair: bool, rate: int) -> AsyncGenerator[Progress, None]:
        """Checks the tiers `names` (all if empty); yields the progress of a tier after each step.

        `rate` limits the bytes per second. With `repair`, a step removes damaged blocks from the
        tier and the catalog before it is yielded. Close the generator to stop the check. Raises
        Refused if a name is unknown, another check is running, or the server is ending.
        """
        numbers = list(self._numbers(names))
        self._sessions.refuse_if_draining()
        if self._running:
            raise Refused("FSCK_RUNNING", "another check of the tiers is running", hold_back=_HOLD_BACK_SECONDS)
        self._running = True
        log = _log.bind(repair=repair)
        log.info("fsck begins", tiers=[self._runtime.tiers[number - 1].name for number in numbers])
        began = self._rests_until
        try:
            await self._pause(self._rests_until - time.monotonic())
            began = time.monotonic()
            for number in numbers:
                async with contextlib.aclosing(self._check(number, repair=repair, rate=rate)) as steps:
                    async for progress in steps:
                        yield progress
        finally:
            self._running = False
            now = time.monotonic()
            self._rests_until = now + min(_REST * (now - began), _MAX_REST_SECONDS)
            log.info("fsck ends")

    def _numbers(self, names: Sequence[str]) -> Iterator[int]:
        known = {tier.name: number for number, tier in enumerate(self._runtime.tiers, start=1)}
        for name in names:
            if name not in known:
                checkable = ", ".join(known) or "none"
                raise Refused("INVALID_ARGUMENT", f"there is no tier {name!r} to check; tiers to check: {checkable}")
        yield from (number for name, number in known.items() if name in names or not names)

    async def _check(self, number: int, *, repair: bool, rate: int) -> AsyncGenerator[Progress, None]:
        progress = Progress(self._runtime.tiers[number - 1])
        try:
            async with contextlib.aclosing(self._steps(number, progress, repair=repair, rate=rate)) as steps:
                async for _ in steps:
                    yield progress
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001 - from the tier's code; the other tiers are still checked
            _log.error("tier cannot be checked", tier=progress.tier.name, exc_info=error)
            progress.error = f"{type(error).__name__}: {error}"
        progress.findings, progress.done = (), True
        yield progress

    async def _steps(self, number: int, progress: Progress, *, repair: bool, rate: int) -> AsyncGenerator[None, None]:
        tier = progress.tier.checkable
        if tier is None:
            progress.note = f"tiers of type {progress.tier.type} cannot be checked"
            return
        progress.total = await asyncio.shield(self._runtime.check(number, tier.blocks_to_check))
        steps = check(tier, repair=repair)
        yield  # reports that the check has begun
        while True:
            began = time.monotonic()
            step = await self._step(number, steps)
            if step is None:
                return
            progress.blocks += step.blocks
            progress.nbytes += step.nbytes
            progress.total = max(progress.total, progress.blocks)
            progress.findings = step.findings
            yield
            took = time.monotonic() - began
            await self._pause(max(_REST * took, step.nbytes / rate - took if rate else 0.0))

    async def _step(self, number: int, steps: Iterator[Slice]) -> Slice | None:
        """Runs a step. A cancelled call still completes the step and applies its repairs."""

        def apply_repairs(step: asyncio.Future[Slice | None]) -> None:
            found = None if step.exception() else step.result()
            names = [finding.name for finding in found.findings if finding.repaired and finding.name] if found else []
            if names:
                named = [(NamespaceId(name[:NAMESPACE_BYTES]), name[NAMESPACE_BYTES:]) for name in names]
                self._runtime.entries_lost(number, named)

        step = self._runtime.check(number, lambda: _checked_slice(next(steps, None)))
        step.add_done_callback(apply_repairs)
        return await asyncio.shield(step)

    async def _pause(self, seconds: float) -> None:
        """Waits; raises Refused if the server is ending."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._sessions.drain_began.wait(), max(0.0, seconds))
        self._sessions.refuse_if_draining()


def _checked_slice(step: Any) -> Slice | None:
    """Raises TierError if the tier's check returned an invalid step."""
    if step is None or (isinstance(step, Slice) and all(isinstance(found, Finding) for found in step.findings)):
        return step
    raise TierError(f"the check of the tier returned an invalid slice: {step!r:.100}")
