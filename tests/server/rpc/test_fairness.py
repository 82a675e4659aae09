"""Fairness: an honest client beside clients that make their largest legal calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from harness.server_process import MIB, ServerProcess

from bench.fairness import ABUSES, TENANTS, Abuser, HonestClient
from kvtier.client import KVTierError

pytestmark = pytest.mark.slow

CALLS = 3
SLICED = dict.fromkeys(("lookups_of_unknown_keys", "stores_of_new_keys", "claims"), 24) | {"publications": 8}
"""Steps that an honest client makes during one of these calls, if the server runs it in slices.

A call has 256 slices or more. Outside of the slices, an honest client makes up to 5 steps
while the server receives the request and answers it. A step has three calls."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yields a server of two tenants with equal parts of the tiers."""
    directory = tmp_path_factory.mktemp("fair")
    with ServerProcess(directory, region=512 * MIB, lmdb=1024 * MIB, config=TENANTS) as process:
        yield process.start()


@pytest.mark.parametrize("abuse", [name for name in ABUSES if name != "spin"])
def test_an_honest_client_is_served_during_each_call_of_an_abuser(server: ServerProcess, abuse: str) -> None:
    """Each step finds, stores and loads its blocks. Other calls run between two slices."""
    steps, ended = 0, threading.Event()
    steps_per_call: list[int] = []

    def call(abuser: Abuser) -> None:
        try:
            for _ in range(CALLS):
                before = steps
                getattr(abuser, abuse)()
                steps_per_call.append(steps - before)
        except KVTierError:  # the server may refuse such calls
            steps_per_call.append(steps)
        finally:
            ended.set()

    with Abuser(server.endpoint, 0) as abuser, HonestClient(server.endpoint) as honest:
        thread = threading.Thread(target=call, args=(abuser,))
        thread.start()
        while not ended.is_set() or not steps:
            honest.step()
            steps += 1
        thread.join()
    assert max(steps_per_call) >= SLICED.get(abuse, 0)
