"""`kvtier fleet drain`: rolling, until the first failure."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.command_line import json_output, kvtier
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.server_process import ServerProcess

from kvtier.client import Client

PART = 64 << 10


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(3):
            (tmp_path / f"{number}").mkdir()
            found.append(stack.enter_context(ServerProcess(tmp_path / f"{number}")))
            found[-1].start(backed=False)
        yield found


def listed(servers: list[ServerProcess]) -> tuple[str, str]:
    return "--servers", ",".join(server.endpoint for server in servers)


def test_all_servers_end_with_durable_blocks(servers: list[ServerProcess]) -> None:
    """Each server writes its blocks before it ends."""
    keys = [key_of(number) for number in range(8)]
    with Client(servers[1].endpoint, namespace=namespace_of(PART)) as client:
        client.store(keys, [payload(key, PART) for key in keys])
        done = kvtier("fleet", "drain", *listed(servers), "--parallel", "2")
    assert sorted(done.stdout.splitlines()[:-1]) == sorted(
        f"{server.endpoint}: drained: the server was drained and has ended" for server in servers
    )
    assert done.stdout.splitlines()[-1] == "3 of 3 servers are drained"
    assert [server.wait() for server in servers] == [0, 0, 0]
    servers[1].start()
    with Client(servers[1].endpoint, namespace=namespace_of(PART)) as client:
        assert_serves(client, keys)


def test_the_first_failure_stops_the_drain(servers: list[ServerProcess]) -> None:
    """An engine stays connected to the second server, which then accepts new work again."""
    with Client(servers[1].endpoint, namespace=namespace_of(PART)) as client:
        client.wait_until_connected(60)
        answer = json_output("fleet", "drain", *listed(servers), "--wait-engines", "0.3", code=1)
    assert [row["state"] for row in answer["servers"]] == ["drained", "failed", "skipped"]
    reason = "engines are still connected after 0.3 s; the server accepts new work again"
    assert answer["servers"][1]["reason"] == reason
    assert (answer["mode"], answer["complete"]) == ("end", False)
    assert [row["ended"] for row in answer["servers"]] == [True, None, None]
    assert [server.alive for server in servers] == [False, True, True]
    assert [server.status().draining for server in servers[1:]] == [False, False]
    done = kvtier("fleet", "drain", *listed(servers), "--undo", code=1)
    assert done.stdout.splitlines()[-1] == "2 of 3 servers accept new work again"


def test_a_requested_drain_stays_after_a_failure(servers: list[ServerProcess]) -> None:
    """By `--stay`, or by an earlier command."""
    server = servers[0]
    with Client(server.endpoint, namespace=namespace_of(PART)) as client:
        client.wait_until_connected(60)
        for stay in (["--stay"], []):
            answer = json_output("fleet", "drain", *listed([server]), "--wait-engines", "0.3", *stay, code=1)
            assert answer["servers"][0]["reason"] == "engines are still connected after 0.3 s"
            assert server.status().draining


def test_a_server_ends_when_its_engines_have_moved(servers: list[ServerProcess]) -> None:
    """The engine disconnects after its server has begun to drain."""
    client = Client(servers[0].endpoint, namespace=namespace_of(PART))
    client.wait_until_connected(60)

    def move() -> None:
        servers[0].wait_for(lambda answer: answer.draining)
        client.close()

    engine = threading.Thread(target=move)
    engine.start()
    answer = json_output("fleet", "drain", *listed(servers[:1]), "--wait-engines", "60")
    engine.join()
    assert [row["state"] for row in answer["servers"]] == ["drained"]
    assert servers[0].wait() == 0


def test_servers_stay_and_accept_work_again(servers: list[ServerProcess]) -> None:
    answer = json_output("fleet", "drain", *listed(servers), "--stay", "--parallel", "3")
    assert [row["state"] for row in answer["servers"]] == ["drained"] * 3
    assert {server.status().draining for server in servers} == {True}
    states = json_output("fleet", "status", *listed(servers), "--interval", "0.1")["servers"]
    assert {row["state"] for row in states} == {"draining"}
    answer = json_output("fleet", "drain", *listed(servers), "--undo")
    assert [row["state"] for row in answer["servers"]] == ["undone"] * 3
    assert {server.status().draining for server in servers} == {False}


def test_no_server_is_drained_unless_all_answer(servers: list[ServerProcess]) -> None:
    servers[1].kill()
    done = kvtier("fleet", "drain", *listed(servers), code=1)
    assert "no server was drained" in done.stderr
    assert servers[1].endpoint in done.stderr
    assert [servers[place].status().draining for place in (0, 2)] == [False, False]


def test_the_next_server_waits_for_a_restart(servers: list[ServerProcess]) -> None:
    """The supervisor restarts the first server, and the second one is drained afterwards."""

    def supervise() -> None:
        for server in servers[:2]:
            server.wait()
            assert servers[1].alive or server is servers[1], "the second server ended before the first was back"
            server.start(backed=False)

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    epochs = [server.status().epoch for server in servers[:2]]
    answer = json_output("fleet", "drain", *listed(servers[:2]), "--wait-restart", "60")
    supervisor.join()
    assert [row["state"] for row in answer["servers"]] == ["drained", "drained"]
    assert not {server.status().epoch for server in servers[:2]} & set(epochs)


def test_a_server_that_is_not_restarted_stops_the_drain(servers: list[ServerProcess]) -> None:
    answer = json_output("fleet", "drain", *listed(servers), "--wait-restart", "0.2", code=1)
    assert [row["state"] for row in answer["servers"]] == ["failed", "skipped", "skipped"]
    assert answer["servers"][0]["reason"] == "no new server answers at its address after 0.2 s"
    assert servers[1].alive
