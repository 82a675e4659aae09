"""`kvtier drain`: makes a server refuse new work, finish running work, and end."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from dataclasses import dataclass

from ...client.errors import KVTierError, NotConnected
from ...protos.endpoint import Endpoint, EndpointError, client_endpoint
from ...protos.v1.admin_pb2 import DrainMode, DrainRequest, DrainResponse
from .admin_client import ask_status, follow, refuse_error
from .console import EXIT_FAILURE, print_line, refuse
from .progress import Progress, progress_bar

__all__ = ["FIGURES", "Drained", "drain_server", "mode_of", "outcome", "run"]

_END_SECONDS = 60.0
_POLL_SECONDS = 0.1
FIGURES = ("stores", "jobs", "queued_bytes", "sessions", "done", "complete")
"""Fields of the answer in the JSON output."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Result of a drain: the server's last answer, and whether the server has ended."""

    last: DrainResponse
    ended: bool

    def succeeded(self, mode: str) -> bool:
        """Whether all work was finished, and the server has ended if it should."""
        return self.last.complete and (self.ended or mode != "end")


def run(options: argparse.Namespace) -> int:
    mode = mode_of(options)
    try:
        endpoint = client_endpoint(options.endpoint)
        with progress_bar("drain") as progress:
            drained = drain_server(endpoint, mode, options.timeout, wait=options.wait, progress=progress)
    except (EndpointError, KVTierError) as error:
        return refuse_error(error)
    except KeyboardInterrupt:
        return refuse(["interrupted; the server continues to drain"], EXIT_FAILURE)
    if options.json:
        figures = {name: getattr(drained.last, name) for name in FIGURES}
        print_line(json.dumps({"mode": mode} | figures | {"ended": drained.ended}, indent=2))
    else:
        print_line(outcome(mode, drained, waited=options.wait))
    return 0 if not options.wait or drained.succeeded(mode) else EXIT_FAILURE


def mode_of(options: argparse.Namespace) -> str:
    """Returns the mode that the flags select: "end", "stay" or "undo"."""
    return "stay" if options.stay else "undo" if options.undo else "end"


def drain_server(
    endpoint: Endpoint, mode: str, timeout: float, *, wait: bool, progress: Progress | None = None
) -> Drained:
    """Drains one server, or undoes its drain. Raises `KVTierError`.

    With `wait`, waits until the server is drained or has ended. Otherwise the result has the
    server's first answer.
    """
    epoch = ask_status(endpoint, timeout).epoch
    request = DrainRequest(mode=f"DRAIN_MODE_{mode.upper()}")
    last, most = DrainResponse(), 0
    with contextlib.closing(follow(endpoint, "Drain", request, timeout)) as steps:
        try:
            for last in steps:
                if not wait:
                    break
                left = last.stores + last.jobs
                most = max(most, left)
                if progress:
                    progress(most - left, most)
        except NotConnected:
            if request.mode != DrainMode.DRAIN_MODE_END:
                raise
    return Drained(last, ended=wait and mode == "end" and _wait_for_end(endpoint, epoch))


def _wait_for_end(endpoint: Endpoint, epoch: int) -> bool:
    """Waits until the server with this epoch has ended; returns False after `_END_SECONDS`."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        try:
            if ask_status(endpoint, 1.0).epoch != epoch:
                return True
        except NotConnected:
            return True
        except KVTierError:
            pass
        time.sleep(_POLL_SECONDS)
    return False


def outcome(mode: str, drained: Drained, *, waited: bool = True) -> str:
    """Returns the result in words."""
    last = drained.last
    if mode == "undo":
        return "the server accepts new work again"
    left = "" if last.complete else "; some work did not finish in time"
    if drained.ended:
        return f"the server was drained and has ended{left}"
    if mode == "stay" and last.done:
        return f"the server is drained, and refuses new work until --undo{left}"
    if waited:
        return f"the server has not ended{left}"
    return f"the server refuses new work; {last.stores} stores and {last.jobs} jobs are running"
