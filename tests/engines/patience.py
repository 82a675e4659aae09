"""Patience, for tests that count hits and blocks: there a call that met its deadline would look like a miss.

The product gives a server 2 s to answer, and notices in 5 s that it hangs: an engine is not to wait for it. A machine that tests
run on may itself pause for longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from kvtier.client import Timeouts, link
from kvtier.client.engines.vllm import connector, holds, worker
from kvtier.client.engines.vllm_tier import manager

__all__ = ["PATIENCE_SECONDS", "patience"]

PATIENCE_SECONDS = 60.0
_DEADLINES = (
    (connector, "_START_SECONDS"),
    (holds, "_CONNECT_WITHIN_S"),
    (link, "_ATTACH_SECONDS"),
    (manager, "_DRAIN_SECONDS"),
    (manager, "_START_SECONDS"),
    (worker, "_CONNECT_WITHIN_S"),
)


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """Clients that this process makes meanwhile wait long for an answer; what has died they notice as soon as ever."""
    deadlines = (PATIENCE_SECONDS,) * len(Timeouts.__init__.__defaults__ or ())
    with contextlib.ExitStack() as changes:
        changes.enter_context(mock.patch.object(Timeouts.__init__, "__defaults__", deadlines))
        for module, name in _DEADLINES:
            changes.enter_context(mock.patch.object(module, name, PATIENCE_SECONDS))
        yield
