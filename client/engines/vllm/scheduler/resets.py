"""Emptying the server's CPU tier when the engine resets its connector, off the scheduler's thread (BEHAVIOUR B3.19, B4.13)."""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import threading

from .... import Client
from ..background import BackgroundThreads, LimitedLog

__all__ = ["CacheReset"]

# The first time that the server says "done" may be the end of a reset that another engine began before this one stored its last.
_ROUNDS = 2
_WAIT_S = 1.0
_RETRY_S = 1.0


class CacheReset:
    """Has the server empty its CPU tier, as often as it was asked to, until it has.

    ``pending`` until the last of these is done, however long that takes. All calls on the scheduler's thread; none blocks.
    """

    def __init__(self, client: Client, log: LimitedLog) -> None:
        self._client = client
        self._log = log
        self._threads = BackgroundThreads("reset", log)
        self._closed = threading.Event()
        # Numbers of resets. Of these, only the background thread writes ``_done``.
        self._started = self._done = self._taken = 0

    @property
    def pending(self) -> bool:
        """Whether something from before a reset may still be there."""
        return self._done != self._started

    def start(self) -> None:
        """All that is stored by now is to go; this engine's own saves have ended."""
        self._started = number = self._started + 1
        self._threads.submit(lambda: self._run(number))

    def take_done(self) -> bool:
        """Whether the last reset that was started has been done since the last call."""
        done = self._done == self._started != self._taken
        if done:
            self._taken = self._started
        return done

    def close(self) -> None:
        """End the thread; called at shutdown."""
        self._closed.set()
        self._threads.close(0.5)

    def _run(self, number: int) -> None:
        rounds = _ROUNDS
        while rounds and not self._closed.is_set():
            try:
                rounds -= self._client.reset(wait=_WAIT_S) == 0
            except Exception as error:  # noqa: BLE001 - whatever it is, what may be stale must go before anything is looked up
                self._log.warn("reset", f"the store is not emptied yet, until then every request is a miss: {error!r}")
                self._closed.wait(_RETRY_S)
        self._done = number
