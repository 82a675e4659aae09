"""Long time-outs for tests that are not about deadlines, because a test machine may pause.

By default the client waits 2 s for an answer. A busy host may pause a virtual machine for 10 s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from kvtier.client import Timeouts
from kvtier.client.session import session, socket_calls
from kvtier.client.transport import socket_connector, socket_streams

__all__ = ["DEFAULTS", "LONG_TIMEOUT_SECONDS", "long_timeouts"]

LONG_TIMEOUT_SECONDS = 60.0
_DEADLINES = (
    (socket_connector, "_LOCATE_SECONDS"),
    (session, "_ATTACH_SECONDS"),
    (socket_calls, "_CONNECT_SECONDS"),
    (socket_streams, "_CONNECT_SECONDS"),
    (socket_streams, "_STALL_SECONDS"),
)
DEFAULTS = {(module, name): getattr(module, name) for module, name in _DEADLINES}
"""The product's defaults, for tests of them."""


@contextlib.contextmanager
def long_timeouts() -> Iterator[None]:
    """Gives clients of this process long default time-outs.

    The detection of dead processes is unchanged.
    """
    deadlines = (LONG_TIMEOUT_SECONDS,) * len(Timeouts.__init__.__defaults__ or ())
    with contextlib.ExitStack() as changes:
        changes.enter_context(mock.patch.object(Timeouts.__init__, "__defaults__", deadlines))
        for module, name in _DEADLINES:
            changes.enter_context(mock.patch.object(module, name, LONG_TIMEOUT_SECONDS))
        yield
