"""Patience of engines, for tests that count hits and blocks: there a call that met its deadline would look like a miss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from harness.patience import PATIENCE_SECONDS
from harness.patience import patience as patience_of_clients

from kvtier.client.engines.vllm import connector
from kvtier.client.engines.vllm.scheduler import hold_calls
from kvtier.client.engines.vllm.worker import worker
from kvtier.client.engines.vllm_tier import manager

__all__ = ["PATIENCE_SECONDS", "patience"]

_DEADLINES = (
    (connector, "_START_SECONDS"),
    (hold_calls, "_CONNECT_WITHIN_S"),
    (manager, "_DRAIN_SECONDS"),
    (manager, "_START_SECONDS"),
    (worker, "_CONNECT_WITHIN_S"),
)


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """Engines that this process makes meanwhile wait long for an answer; what has died they notice as soon as ever."""
    with contextlib.ExitStack() as changes:
        changes.enter_context(patience_of_clients())
        for module, name in _DEADLINES:
            changes.enter_context(mock.patch.object(module, name, PATIENCE_SECONDS))
        yield
