"""`kvtier drain`: makes a server refuse new work, finish running work, and end."""

from __future__ import annotations

import argparse
import contextlib
import json
import time

from ...protos.endpoint import Endpoint, EndpointError, client_endpoint
from ...protos.v1.admin_pb2 import DrainMode, DrainRequest, DrainResponse
from .admin_client import AdminClientError, UnreachableError, ask_status, follow, refuse_error
from .console import EXIT_FAILURE, print_line, refuse
from .progress import progress_bar

__all__ = ["FIGURES", "run"]

_END_SECONDS = 60.0
_POLL_SECONDS = 0.1
FIGURES = ("stores", "jobs", "queued_bytes", "sessions", "done", "complete")
"""Fields of the answer in the JSON output."""


def run(options: argparse.Namespace) -> int:
    name = "stay" if options.stay else "undo" if options.undo else "end"
    try:
        endpoint = client_endpoint(options.endpoint)
        epoch = ask_status(endpoint, options.timeout).epoch
        last = _drain(endpoint, DrainRequest(mode=f"DRAIN_MODE_{name.upper()}"), options)
        ended = options.wait and name == "end" and _wait_for_end(endpoint, epoch)
    except (EndpointError, AdminClientError) as error:
        return refuse_error(error)
    except KeyboardInterrupt:
        return refuse(["interrupted; the server continues to drain"], EXIT_FAILURE)
    if options.json:
        figures = {name: getattr(last, name) for name in FIGURES}
        print_line(json.dumps({"mode": name} | figures | {"ended": ended}, indent=2))
    else:
        print_line(_text(options, last, ended=ended))
    if not options.wait:
        return 0
    return 0 if last.complete and (ended or name != "end") else EXIT_FAILURE


def _drain(endpoint: Endpoint, request: DrainRequest, options: argparse.Namespace) -> DrainResponse:
    """Returns the server's first answer; with --wait, the last answer."""
    last = DrainResponse()
    most = 0
    steps = follow(endpoint, "Drain", request, options.timeout)
    with progress_bar("drain") as progress, contextlib.closing(steps):
        try:
            for last in steps:
                if not options.wait:
                    break
                left = last.stores + last.jobs
                most = max(most, left)
                if progress:
                    progress(most - left, most)
        except UnreachableError:
            if request.mode != DrainMode.DRAIN_MODE_END:
                raise
    return last


def _wait_for_end(endpoint: Endpoint, epoch: int) -> bool:
    """Waits until the server with this epoch has ended; returns False after `_END_SECONDS`."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        try:
            if ask_status(endpoint, 1.0).epoch != epoch:
                return True
        except UnreachableError:
            return True
        except AdminClientError:
            pass
        time.sleep(_POLL_SECONDS)
    return False


def _text(options: argparse.Namespace, last: DrainResponse, *, ended: bool) -> str:
    if options.undo:
        return "the server accepts new work again"
    left = "" if last.complete else "; some work did not finish in time"
    if ended:
        return f"the server was drained and has ended{left}"
    if options.stay and last.done:
        return f"the server is drained, and refuses new work until --undo{left}"
    if options.wait:
        return f"the server has not ended{left}"
    return f"the server refuses new work; {last.stores} stores and {last.jobs} jobs are running"
