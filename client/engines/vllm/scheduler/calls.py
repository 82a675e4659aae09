"""What an adapter's calls about requests share: the first one announces a request, the last one ends it (B3.12).

Everything here is done on background threads, and a server that fails or hangs is left in peace for a moment: it costs one
deadline, not one per request.
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from .... import Client, InvalidRequest, KVTierError, Lease, LimitExceeded
from ..background import BackgroundThreads, LimitedLog, logger
from .announcements import Announcement, plain_params

__all__ = ["RequestCalls"]

_COOL_DOWN_S = 2.0


class RequestCalls:
    """Announces requests and ends them. Public methods are called on the scheduler's thread, unless they say otherwise."""

    def __init__(self, client: Client, log: LimitedLog) -> None:
        self._client = client
        self._log = log
        self._lock = threading.Lock()
        self._cool_until = 0.0
        # Its own thread: giving back must not queue behind lookups that wait for promotions.
        self._returns = BackgroundThreads("release", log)

    @property
    def cooling(self) -> bool:
        """Whether the server failed a moment ago and is not asked now. Any thread."""
        return time.monotonic() < self._cool_until

    def reachable(self) -> bool:
        """Whether it makes sense to ask the server anything now. Any thread."""
        if not self._client.connected:
            self._log.warn(
                "disconnected", "no kvtier server is connected; requests are computed as if nothing were cached"
            )
            return False
        return not self.cooling

    def cool_down(self, error: KVTierError | None = None) -> None:
        """Leave the server in peace for a moment; not for a refusal, which says something of one request only. Any thread."""
        if not isinstance(error, (InvalidRequest, LimitExceeded)):
            self._cool_until = time.monotonic() + _COOL_DOWN_S

    def announce(self, request: Announcement) -> None:
        """Have the tiers vote on a request that is not looked up: they may want blocks that the engine has itself (B1.1)."""
        if self._client.connected and not self.cooling:
            self.hold(request)
            request.voting = True
            self._returns.submit(lambda: self._announce(request))

    def hold(self, request: Announcement) -> None:
        """A call about the request begins: the server is not told of its end before as many ``let_go``."""
        with self._lock:
            request.pending += 1

    def let_go(self, request: Announcement) -> None:
        """A call about the request has ended. Any thread."""
        with self._lock:
            request.pending -= 1
            finish = request.ended and request.pending == 0
        if finish:
            self._submit_finish(request)

    def finish_request(self, request: Announcement) -> None:
        """Tell the server, in the background, that the request has ended: once nothing of it is pending."""
        with self._lock:
            request.ended = True
            finish = request.pending == 0
        if finish:
            self._submit_finish(request)

    def release(self, leases: Sequence[Lease]) -> None:
        """Give leases back, in the background. Any thread."""
        for lease in leases:
            self._returns.submit(lease.release)

    def close(self) -> None:
        """End the thread; called at shutdown."""
        self._returns.close(1.0)

    def _submit_finish(self, request: Announcement) -> None:
        if self._client.connected:
            self._returns.submit(lambda: self._finish(request.request_id))

    # ---- background threads from here on

    def ask(
        self, request: Announcement, keys: Sequence[bytes], wait: float, *, prefix: bool, min_hits: int = 0
    ) -> Lease:
        """A request's first call announces it, so that the tiers vote on it; the others only look up. Raises KVTierError.

        ``min_hits``: with ``prefix``, fewer leading hits are misses.
        """
        options: dict[str, Any] = request.lookup_options()
        if min_hits > 1:
            options["min_hits"] = min_hits
        with self._lock:
            first, request.begun = not request.begun, True
        if not first:
            return self._client.lookup(keys, request_id=request.request_id, wait=wait, prefix=prefix, **options)
        try:
            lease = self._client.begin_request(
                request.request_id,
                keys,
                prompt_tokens=request.prompt_tokens,
                kv_transfer_params=plain_params(request.kv_transfer_params),
                wait=wait,
                prefix=prefix,
                **options,
                **request.begin_options(),
            )
        except KVTierError:
            request.begun = False
            raise
        request.policy = lease.policy
        logger.debug("kvtier: request %s: %s, votes %s", request.request_id, lease.policy, lease.votes)
        return lease

    def _announce(self, request: Announcement) -> None:
        try:
            if not request.begun:
                self.ask(request, (), 0.0, prefix=True)
        except KVTierError as error:
            self.cool_down(error)
            self._log.warn("announce", f"could not announce a request: {error}")
        finally:
            request.voting = False
            self.let_go(request)

    def _finish(self, request_id: str) -> None:
        try:
            self._client.finish_request(request_id)
        except KVTierError as error:
            self._log.warn("finish", f"could not end a request: {error}")
