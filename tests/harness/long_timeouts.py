"""Patience, for tests that are not about deadlines: a machine that they run on may pause for longer than an engine would wait.

The product gives a server 2 s to answer. A host that is short of processors takes them from a virtual machine for ten.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar
from unittest import mock

from kvtier.client import Timeouts
from kvtier.client.session import session, socket_calls
from kvtier.client.transport import bulk_connector, tcp_streams

__all__ = ["DEFAULTS", "LONG_TIMEOUT_SECONDS", "long_timeouts", "wait_until"]

T = TypeVar("T")

LONG_TIMEOUT_SECONDS = 60.0
_DEADLINES = (
    (bulk_connector, "_CONNECT_SECONDS"),
    (session, "_ATTACH_SECONDS"),
    (socket_calls, "_CONNECT_SECONDS"),
    (tcp_streams, "_CONNECT_SECONDS"),
)
DEFAULTS = {(module, name): getattr(module, name) for module, name in _DEADLINES}
"""What the product sets, for the tests that are about it."""


@contextlib.contextmanager
def long_timeouts() -> Iterator[None]:
    """Clients of this process wait long for an answer, unless they are told how long; what has died they notice as soon as ever."""
    deadlines = (LONG_TIMEOUT_SECONDS,) * len(Timeouts.__init__.__defaults__ or ())
    with contextlib.ExitStack() as changes:
        changes.enter_context(mock.patch.object(Timeouts.__init__, "__defaults__", deadlines))
        for module, name in _DEADLINES:
            changes.enter_context(mock.patch.object(module, name, LONG_TIMEOUT_SECONDS))
        yield


def wait_until(what: Callable[[], T], seconds: float = LONG_TIMEOUT_SECONDS) -> T:
    """Waits until `what()` is true, and returns it."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it has not come about"
        time.sleep(0.01)
    return found
