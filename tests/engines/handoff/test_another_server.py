"""Two simulated hosts, each with a server and an engine, and a model with sliding windows.

The first engine prefills and is gone. The second one decodes what it takes from the other server,
and goes on in both roles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from deployment import eventually
from harness.ports import ReservedPort
from scenario import RunEngine, assert_same, generate, server_step, tokens
from server_process import ServerProcess

LONG, SHORT, EDGE, SAID, MORE = 333, 70, 383, 30, 25
"""Tokens: a first question longer than the windows of 128, one that they all see, and one whose
last token, which is always computed anew, looks at a block that the first engine has released by
then; answers; and second questions."""

ASKED = [tokens(61, LONG), tokens(62, SHORT), tokens(65, EDGE)]
ASKED_NEXT = [tokens(63, MORE), tokens(64, MORE), tokens(66, MORE)]
PREFILL, DECODE = {"max_tokens": 1}, {"max_tokens": SAID}
FIRST_TURN = [{"do_remote_decode": True}] * len(ASKED)
ALONE = {"skip_load": True, "skip_save": True}
EXTRA = {"bidirectional_kv_xfer": True, "claim_timeout_s": 60.0, "kv_lease_duration": 900.0}
"""The first engine's holds last until the second engine has started."""


class Hosts:
    """The servers of two hosts, and the address of each for the other."""

    def __init__(self, servers: list[ServerProcess], addresses: list[str]) -> None:
        self.servers, self.addresses = servers, addresses

    def engine_of(self, host: int) -> dict[str, Any]:
        """Returns the arguments of `run_engine` for an engine on one host."""
        peers = [address for number, address in enumerate(self.addresses) if number != host]
        extra = {**EXTRA, "advertise": self.addresses[host], "peers": peers}
        return {"model": "hybrid", "endpoint": self.servers[host].endpoint, "extra": extra}

    def totals(self, host: int) -> dict[str, list[int]]:
        """Returns a server's published, claimed and released holds, by direction."""
        totals = self.servers[host].handoffs()["totals"]
        return {row["direction"]: [row[what] for what in ("published", "claimed", "released")] for row in totals}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Both servers, running."""
    ports = [ReservedPort() for _ in range(2)]
    addresses = [f"127.0.0.1:{port.number}" for port in ports]
    servers = [
        ServerProcess(
            tmp_path_factory.mktemp("host"),
            region="64MiB",
            flags=["--insecure", "--listen", address],
            long_timeout=True,
        )
        for address in addresses
    ]
    try:
        for server in servers:
            server.start()
        yield Hosts(servers, addresses)
    finally:
        for server in servers:
            server.kill()
        for port in ports:
            port.close()


@pytest.fixture(scope="module")
def first(run_engine: RunEngine, hosts: Hosts) -> dict[str, Any]:
    """The engine on the first host.

    Before it is P, it answers without loads, saves and holds.
    """
    steps = [
        generate("1", ASKED, settings=ALONE, **DECODE),
        generate("2", ASKED_NEXT, settings=ALONE, **DECODE) | {"continues": "1"},
        {"op": "reset"},
        generate("P 1", ASKED, transfers=FIRST_TURN, **PREFILL),
    ]
    return run_engine(steps, **hosts.engine_of(0))


@pytest.fixture(scope="module")
def turns(run_engine: RunEngine, hosts: Hosts, first: dict[str, Any]) -> dict[str, Any]:
    """Two turns: P on the first host; D, P and D on the other, with empty caches in between."""
    given = [row["transfer"] for row in first["P 1"]["rows"]]
    second = [
        asked + row["tokens"] + more for asked, row, more in zip(ASKED, first["1"]["rows"], ASKED_NEXT, strict=True)
    ]
    steps = [
        generate("D 1", ASKED, transfers=given, **DECODE),
        {"op": "reset"},
        generate("P 2", second, **PREFILL) | {"takes_over": "D 1"},
        {"op": "reset"},
        generate("D 2", second, **DECODE) | {"takes_over": "P 2"},
        server_step(hosts.servers[1], "await-holds", "decode_to_prefill", "6"),
    ]
    return first | run_engine(steps, **hosts.engine_of(1))


@pytest.mark.parametrize("turn", ["1", "2"])
def test_answers_are_those_of_one_engine(turns: dict[str, Any], turn: str) -> None:
    """B2.18 Of a window only its last blocks are sent, which is sufficient."""
    assert_same(turns[turn], turns[f"D {turn}"])
    assert [row["tokens"] for row in turns[f"P {turn}"]["rows"]] == [row["tokens"][:1] for row in turns[turn]["rows"]]


def test_all_but_the_last_token_is_taken_over(turns: dict[str, Any]) -> None:
    """B2.2, B2.3 Nothing is computed twice, the partly filled last block included, if possible."""
    prompts = LONG + SHORT + EDGE
    assert turns["P 1"]["external_hits"] == 0
    assert turns["D 1"]["external_hits"] == prompts - EDGE, "none of it is in this server's cache"
    assert turns["P 2"]["external_hits"] == prompts + len(ASKED) * (SAID - 1)
    assert turns["D 2"]["external_hits"] == prompts + len(ASKED) * (SAID + MORE)


def test_each_server_has_what_its_own_engine_holds(hosts: Hosts, turns: dict[str, Any]) -> None:
    """B2.11, B2.18 Parameters name the server that holds the blocks, and it gets the release."""
    assert {row["transfer"]["remote_port"] for row in turns["P 1"]["rows"]} == {int(hosts.addresses[0].split(":")[1])}
    assert hosts.totals(0) == {"prefill_to_decode": [3, 3, 3], "decode_to_prefill": [0, 0, 0]}
    assert hosts.totals(1) == {"prefill_to_decode": [3, 3, 3], "decode_to_prefill": [6, 3, 3]}
    eventually(lambda: not any(host.status()["leases"] for host in hosts.servers), "leases are left")
