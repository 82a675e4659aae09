"""Fake engines with the disaggregation proxy in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from disagg_proxy.settings import Engine, Settings

from .fake_engine import FakeEngine
from .running_proxy import Clock, RunningProxy, run_proxy

__all__ = ["Site"]


@dataclass
class Site:
    """Two engines of each role."""

    prefill: list[FakeEngine]
    decode: list[FakeEngine]

    def settings(self, prefills: int = 1, decodes: int = 1, hints: str | None = None) -> Settings:
        """Settings of a proxy for this many engines, whose kvtier server is `hints`."""
        return Settings(
            prefill=tuple(Engine(engine.url, hints=hints) for engine in self.prefill[:prefills]),
            decode=tuple(Engine(engine.url, hints=hints) for engine in self.decode[:decodes]),
            check_interval=0.05,
        )

    @asynccontextmanager
    async def proxy(self, settings: Settings | None = None, clock: Clock | None = None) -> AsyncIterator[RunningProxy]:
        """Runs a proxy that has discovered its decode engines."""
        settings = settings or self.settings()
        async with run_proxy(settings, clock) as running:
            urls = {decode.url for decode in settings.decode}
            await running.wait_discovered(
                *(engine.engine_id for engine in self.decode if engine.url in urls and engine.bidirectional)
            )
            yield running
