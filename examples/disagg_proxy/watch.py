"""Health checks of engines, and probes that identify decode engines."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import uuid
from collections.abc import Awaitable, Callable

from .engines import EngineFailedError, Engines, engine_headers
from .fleet import Instance, Role
from .transfer import EngineIdentity, for_engine, hold_only

__all__ = ["Watch"]

HEALTH_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 30.0
TICK_S = 1.0

logger = logging.getLogger(__name__)


class Watch:
    """Watches one engine. `check_s`, `probe_s`: seconds between two checks and two probes."""

    def __init__(
        self, instance: Instance, engines: Engines, clock: Callable[[], float], *, check_s: float, probe_s: float
    ) -> None:
        self._instance = instance
        self._engines = engines
        self._clock = clock
        self._check_s = check_s
        self._checked_at = clock()
        self._probed_at = -math.inf
        self._probe_s = probe_s
        self._is_refused = False
        # One name for all probes, so that each probe's hold replaces the previous one.
        self._hold_as = f"disagg_proxy.probe.{uuid.uuid4().hex}"

    async def run(self) -> None:
        """Checks and probes the engine until cancelled."""
        await asyncio.gather(self._again_and_again(self.probe), self._again_and_again(self._check_if_due))

    async def _again_and_again(self, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await look()
            except Exception:
                logger.exception("watching %s failed", self._instance.url)
            await asyncio.sleep(min(TICK_S, self._check_s))

    async def _check_if_due(self) -> None:
        if self._is_check_due():
            await self.check()

    async def check(self) -> None:
        """Checks the engine's health."""
        instance, was_up, self._checked_at = self._instance, self._instance.is_up, self._clock()
        instance.is_suspect = False
        try:
            answer = await self._engines.ask(instance, "/health", None, {}, timeout_s=HEALTH_TIMEOUT_S)
            is_well = answer.status == 200
        except EngineFailedError:
            is_well = False
        if is_well:
            instance.is_healthy()
        else:
            instance.failed(self._clock())
        if instance.is_up is not was_up:
            logger.warning("%s (%s) is %s", instance.url, instance.role.value, "up" if instance.is_up else "down")

    async def probe(self) -> None:
        """Asks a decode engine for one token, because the answer contains the engine's identity.

        The identity is missing if the engine holds no requests.
        """
        instance = self._instance
        if instance.role is not Role.DECODE or not instance.is_up or not self._is_probe_due():
            return
        self._probed_at = self._clock()
        key = os.environ.get("VLLM_API_KEY")
        headers = engine_headers({"authorization": f"Bearer {key}"} if key else {})
        try:
            models = await self._engines.ask(instance, "/v1/models", None, headers, timeout_s=PROBE_TIMEOUT_S)
            body = {"model": _first_model(models.parsed()), "prompt": [1], "max_tokens": 1}
            body["kv_transfer_params"] = for_engine(hold_only(), {}, self._hold_as)
            answer = await self._engines.ask(instance, "/v1/completions", body, headers, timeout_s=PROBE_TIMEOUT_S)
            params = None if answer.status >= 400 else answer.parsed().get("kv_transfer_params")
        except EngineFailedError as error:
            logger.warning("%s does not answer a probe: %s", instance.url, error.cause.value)
            return
        if answer.status >= 400:
            self._note_refusal(answer.status)
            return
        engine = EngineIdentity.parse(params)
        if engine is None:
            logger.warning("%s holds no requests, so the next turn of a stream cannot use its blocks", instance.url)
        instance.identified(engine, self._clock())

    def _note_refusal(self, status: int) -> None:
        """Keeps the known identity. The next probe follows after the usual time."""
        instance = self._instance
        if not self._is_refused:
            logger.warning("%s refuses probes (status %d); is VLLM_API_KEY missing?", instance.url, status)
        self._is_refused = True
        instance.identified(instance.engine, self._clock())

    def _is_probe_due(self) -> bool:
        seen_at, now = self._instance.engine_seen_at, self._clock()
        return (seen_at is None or now - seen_at >= self._probe_s) and now - self._probed_at >= self._check_s

    def _is_check_due(self) -> bool:
        """Whether a check is due. An engine that is down is checked as soon as its pause ends."""
        if self._instance.is_up and self._instance.is_suspect:
            return True
        due_at = self._checked_at + self._check_s if self._instance.is_up else self._instance.retry_at
        return self._clock() >= due_at


def _first_model(listing: dict[str, object]) -> object:
    models = listing.get("data")
    first = models[0] if isinstance(models, list) and models else None
    return first.get("id") if isinstance(first, dict) else None
