"""What the service manager is told: systemd's `sd_notify` protocol, as of sd_notify(3).

One datagram per message to the Unix socket that `NOTIFY_SOCKET` names. Who starts the server without one (a shell, a container)
has set none, and then nothing is said. The protocol is frozen and this small, so that no library is needed for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

from ..telemetry.logs import get_logger

__all__ = ["ServiceManager"]

_log = get_logger(__name__)


class ServiceManager:
    """Tells the service manager of this process, if it has one, how the server is.

    Never raises: a manager that is gone is no reason to fail.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        # "@" stands for the NUL byte of an abstract socket; other kinds (vsock) are for machines, not for services.
        self._address = {"/": path, "@": f"\0{path[1:]}"}.get(path[:1])
        self.watchdog_seconds = _watchdog_seconds(environment)
        """How long the manager may hear nothing before it ends the process; None where it does not watch."""
        self._watchdog: asyncio.Task[None] | None = None

    def ready(self) -> None:
        """The server serves. From now on the manager hears that the event loop turns, if it asked for that."""
        self._say("READY=1")
        if self.watchdog_seconds is not None and self._address is not None:
            self._watchdog = asyncio.get_running_loop().create_task(self._keep_saying(self.watchdog_seconds / 2))

    def stopping(self) -> None:
        """The server takes no new work. The loop is still watched: an end that hangs is noticed as well."""
        self._say("STOPPING=1")

    def close(self) -> None:
        """Ends what `ready` began."""
        if self._watchdog is not None:
            self._watchdog.cancel()

    async def _keep_saying(self, seconds: float) -> None:
        while True:
            self._say("WATCHDOG=1")
            await asyncio.sleep(seconds)

    def _say(self, message: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as sender:
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            _log.debug("the service manager cannot be told", message=message, reason=str(error))


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """Returns what `WATCHDOG_USEC` says, if it is meant for this process (`WATCHDOG_PID`; children inherit both)."""
    if environment.get("WATCHDOG_PID", f"{os.getpid()}") != f"{os.getpid()}":
        return None
    try:
        microseconds = int(environment.get("WATCHDOG_USEC", ""))
    except ValueError:
        return None
    return microseconds / 1e6 if microseconds > 0 else None
