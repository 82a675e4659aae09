"""Other clients that fill the server's memory."""

from __future__ import annotations

import numpy as np
from server_process import ServerProcess

from kvtier.client import Client, Group, Namespace, Timeouts, make_key

__all__ = ["fill_server_memory"]

_PAGE = 1 << 20
_ROUNDS = 2
_TIMEOUTS = Timeouts(connect=60, call=60)


def fill_server_memory(server: ServerProcess) -> None:
    """Stores more than the CPU tier can hold, so that all other evictable blocks are evicted."""
    [cpu] = [tier for tier in server.status()["tiers"] if tier["name"] == "cpu"]
    count = _ROUNDS * cpu["capacity_bytes"] // _PAGE
    page = np.zeros(_PAGE, np.uint8)
    namespace = Namespace("others", "float32", (Group(_PAGE, 32),))
    with Client(server.endpoint, namespace=namespace, engine_id="others", rank=0, timeouts=_TIMEOUTS) as client:
        for number in range(count):
            client.store([make_key(b"%016d" % number, 0)], [page])
    [crowded] = [tier for tier in server.status()["tiers"] if tier["name"] == "cpu"]
    assert crowded["evictions"] - cpu["evictions"] >= count // 2
