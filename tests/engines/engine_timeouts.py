"""Long timeouts for engines in tests that count hits: a missed deadline would look like a miss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from harness.long_timeouts import LONG_TIMEOUT_SECONDS
from harness.long_timeouts import long_timeouts as client_long_timeouts

from kvtier.client.engines.identity import InBackground
from kvtier.client.engines.vllm import connector, lora
from kvtier.client.engines.vllm.scheduler import hold_calls
from kvtier.client.engines.vllm.worker import worker
from kvtier.client.engines.vllm_tier import manager, transfers

__all__ = ["LONG_TIMEOUT_SECONDS", "long_timeouts", "prepare_engine"]

_DEADLINES = (
    (hold_calls, "_CONNECT_WITHIN_S"),
    (manager, "_DRAIN_SECONDS"),
    (manager, "_TRANSFER_SECONDS"),
    (transfers, "_JOB_SECONDS"),
    (manager, "_START_SECONDS"),
    (connector, "_START_SECONDS"),
    (worker, "_CONNECT_WITHIN_S"),
)


class Awaited(InBackground[Any]):
    """Work in the background for which an engine waits, because tests count its first hits."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.wait(LONG_TIMEOUT_SECONDS)


@contextlib.contextmanager
def long_timeouts() -> Iterator[None]:
    """Engines created in this context have long timeouts, but notice closed connections."""
    with contextlib.ExitStack() as changes:
        changes.enter_context(client_long_timeouts())
        for module, name in _DEADLINES:
            changes.enter_context(mock.patch.object(module, name, LONG_TIMEOUT_SECONDS))
        for module in (connector, lora, manager):
            changes.enter_context(mock.patch.object(module, "InBackground", Awaited))
        yield


_for_good = contextlib.ExitStack()


def prepare_engine() -> None:
    """Gives this process, and those that it forks, long timeouts. There is no way back."""
    _for_good.enter_context(long_timeouts())
