"""An expired hold is not read, whether its parameters or only the server know of the expiry."""

from __future__ import annotations

import time

import pytest
from conversation_client import ConversationClient
from conversations import held_by_decode, local_blocks, prompt_tokens
from deployment import Deployment, eventually
from engine_server import Sources

CACHED = local_blocks(held_by_decode(1))
"""Whole blocks are in the cache for every request, with or without a hold."""

FROM_CACHE = Sources(prompt_tokens(2) - CACHED, 0, CACHED)
FROM_HOLD = Sources(prompt_tokens(2) - held_by_decode(1), 0, held_by_decode(1))
MARGIN = 5.0
ENDS_HERE = {"do_remote_decode": True, "kvtier": {"hold": False}}
"""There is no decode, so P must not hold anything."""

SHORT = 6.0
"""Seconds: so long a hold lasts that is to be over soon. P's heartbeat makes it last for 4 s more:
not enough to be read."""


@pytest.mark.parametrize(
    ("name", "left", "sources"),
    [("over", -60.0, FROM_CACHE), ("nearly over", 4.0, FROM_CACHE), ("not over", 60.0, FROM_HOLD)],
)
def test_what_parameters_say(
    deployment: Deployment, talk: ConversationClient, name: str, left: float, sources: Sources
) -> None:
    """B2.19 P claims nothing that expires within 5 s, and tells the server to release it."""
    deployment.empty()
    with deployment.watch(p=0, published=1):
        params = talk.direct("D", name, 1, {"do_remote_prefill": True})
    assert params["remote_blocks_expiry_time"] > time.time() + 60
    with deployment.watch(d=0, ended=1) as moved:
        talk.direct("P", name, 2, {**params, "remote_blocks_expiry_time": time.time() + left, **ENDS_HERE})
    assert moved.p == sources
    assert moved.to_prefill["claimed"] == (sources == FROM_HOLD)
    assert moved.to_prefill["released"] == 1


def test_what_the_server_knows(deployment: Deployment, talk: ConversationClient) -> None:
    """B2.19 The server's expiry counts: it refuses reads from 5 s before the end on."""
    deployment.restart_server(longest_hold=SHORT)
    deployment.empty()
    with deployment.watch(p=0, published=1) as moved:
        params = talk.direct("D", "expired", 1, {"do_remote_prefill": True})
    assert params is not None
    assert moved.to_prefill["published"] == 1
    eventually(lambda: all(hold["remaining_seconds"] < MARGIN for hold in deployment.open_holds()), "the hold lasts")
    with deployment.watch(d=0) as moved:
        talk.direct("P", "expired", 2, params)
    assert moved.p == FROM_CACHE
    assert moved.to_prefill["claimed"] == 0
    eventually(lambda: not deployment.open_holds(), "a hold does not end")
    ends = deployment.totals("to_prefill")
    assert ends["claimed"] == 0
    assert ends["released"] + ends["expired"] == ends["published"]
