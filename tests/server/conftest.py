from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator

import pytest
import structlog
from harness.bulk import Route
from harness.raw import RawSession

from kvtier.server.telemetry import logs


@pytest.fixture
def session(route: Route, request: pytest.FixtureRequest) -> Iterator[RawSession]:
    """A raw session of an engine of this test; the previous session may still be closing."""
    with route.session(request.module.NAMESPACE, request.node.name) as session:
        yield session


@pytest.fixture
def restored_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores logging after a test that configures it, for later tests that look for lines."""
    root = logging.getLogger()
    before = (root.handlers[:], sys.excepthook, threading.excepthook)
    levels = {logger: logger.level for logger in map(logging.getLogger, (None, *logs._CHATTY))}
    structured = structlog.get_config() if structlog.is_configured() else None
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")  # the server sets it if it is missing
    yield
    logs.flush()
    root.handlers[:], sys.excepthook, threading.excepthook = before
    for logger, level in levels.items():
        logger.setLevel(level)
    structlog.reset_defaults()
    if structured is not None:
        structlog.configure(**structured)
    logging.captureWarnings(False)
