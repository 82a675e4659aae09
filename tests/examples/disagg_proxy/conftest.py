"""Fake engines for the proxy's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from harness.disagg_site import Site
from harness.fake_engine import FakeEngine


@pytest.fixture
async def site(no_leaks: None) -> AsyncIterator[Site]:  # noqa: ARG001 - is to watch
    """The engines, all up."""
    engines = [FakeEngine(name) for name in ("p0", "p1", "d0", "d1")]
    for engine in engines:
        await engine.start()
    yield Site(engines[:2], engines[2:])
    for engine in engines:
        await engine.stop()
        engine.close()
