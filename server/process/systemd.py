"""Notification of systemd: the `sd_notify` protocol, see sd_notify(3).

Each message is one datagram to the Unix socket named by `NOTIFY_SOCKET`. If that variable is not
set (in a shell or a container), nothing is sent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from ..telemetry.downgrades import Downgrades
from .notify_socket import notify, notify_address

__all__ = ["ServiceManager"]


class ServiceManager:
    """Sender of the server's state to the service manager, if there is one. Never raises."""

    def __init__(self, downgrades: Downgrades, environment: Mapping[str, str] = os.environ) -> None:
        self._downgrades = downgrades
        self._address = notify_address(environment)
        self.watchdog_seconds = _watchdog_seconds(environment)
        """Watchdog time-out of the service manager; None without a watchdog."""
        self._watchdog: asyncio.Task[None] | None = None

    def ready(self) -> None:
        """Reports that the server accepts calls. Starts the watchdog messages if configured."""
        self._send("READY=1")
        if self.watchdog_seconds is not None and self._address is not None:
            self._watchdog = asyncio.get_running_loop().create_task(self._send_watchdog(self.watchdog_seconds / 2))

    def stopping(self) -> None:
        """Reports the shutdown. Watchdog messages continue, so that systemd notices a hang."""
        self._send("STOPPING=1")

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    async def _send_watchdog(self, seconds: float) -> None:
        while True:
            self._send("WATCHDOG=1")
            await asyncio.sleep(seconds)

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        try:
            notify(self._address, message)
        except OSError as error:
            cause = f"the service manager does not learn the state of the server: {error}"
            self._downgrades.report("service_manager", cause, "check NOTIFY_SOCKET; docs/deploy.md#systemd")
        else:
            self._downgrades.end("service_manager")


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """Returns the value of `WATCHDOG_USEC` in seconds, if `WATCHDOG_PID` names this process."""
    if environment.get("WATCHDOG_PID", f"{os.getpid()}") != f"{os.getpid()}":
        return None
    try:
        microseconds = int(environment.get("WATCHDOG_USEC", ""))
    except ValueError:
        return None
    return microseconds / 1e6 if microseconds > 0 else None
