"""`kvtier fleet`: rows of many servers, their addresses, and the live screen."""

from __future__ import annotations

import argparse
import json
import socket
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness.certificates import Authority
from harness.command_line import json_output, kvtier
from harness.payloads import filled, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.ports import ReservedPort
from harness.server_process import ServerProcess
from harness.terminal import Terminal
from rich.cells import cell_len
from rich.console import Console

from kvtier.client import Client
from kvtier.protos.endpoint import Endpoint
from kvtier.protos.v1 import admin_pb2, admin_pb2_grpc
from kvtier.server.commands.fleet import Fleet
from kvtier.server.commands.fleet_servers import FleetError, find_servers
from kvtier.server.commands.fleet_view import FleetScreen, fleet_values, server_row
from kvtier.server.commands.rates import rates
from kvtier.server.commands.top_views import SERVERS
from kvtier.server.telemetry import status

PART = 64 << 10
HOSTILE = "a\x1b[2Jb\u202ec\u2028d"
SHOWN = r"a\x1b[2Jb\u202ec\u2028d"
FIGURES = {
    *("server", "state", "reason", "version", "epoch", "uptime_seconds", "shared_tiers"),
    *("memory_used_bytes", "memory_capacity_bytes", "memory_fill", "lookup_keys", "lookup_misses"),
    *("lookup_keys_per_s", "hit_rate", "stored_bytes_per_s", "loaded_bytes_per_s"),
    *("engines", "sessions", "leases", "queued_bytes"),
}
VALKEY = "[[tiers]]\ntype = 'valkey'\n[tiers.options]\nurl = 'valkey://127.0.0.1:{port}'\n"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Yields a server with an engine, a killed one, and one whose shared store is absent."""
    with ReservedPort() as closed:
        added = ("", "", VALKEY.format(port=closed.number))
        servers = [ServerProcess(tmp_path_factory.mktemp("s"), tcp=True, tier_config=text) for text in added]
        for server in servers:
            server.start(backed=False)
        servers[1].kill()
        namespace = namespace_of(PART, model=f"model {HOSTILE}")
        with Client(servers[0].endpoint, namespace=namespace, name=f"client {HOSTILE}", engine_id="e-0") as client:
            client.wait_until_connected(60)
            keys = [key_of(number) for number in range(3)]
            client.store(keys, [payload(key, PART) for key in keys])
            client.lookup([*keys, key_of(9)], prefix=False).release()
            client.load(keys[:1], filled(1, PART))
            servers[2].wait_for(lambda answer: not answer.tiers[-1].healthy)
            yield servers
        for server in servers:
            server.close()


def listed(servers: Sequence[ServerProcess]) -> tuple[str, str]:
    return "--servers", ",".join(server.tcp for server in servers)


def chosen(**values: str) -> argparse.Namespace:
    return argparse.Namespace(**{"servers": None, "dns": None, "file": None} | values)


def resolver(*addresses: str) -> Callable[..., list[Any]]:
    """Returns a resolver that answers like `socket.getaddrinfo`: one entry per address."""

    def lookup(_: str, port: int, **__: Any) -> list[Any]:
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [(family, 1, 6, "", (address, port)) for family, address in zip(families, addresses, strict=True)]

    return lookup


def assert_harmless(text: str) -> None:
    bad = [character for character in text if character != "\n" and unicodedata.category(character)[0] in "CZ"]
    assert set(bad) <= {" "}, ascii(text)


def test_each_server_is_a_row(fleet: list[ServerProcess]) -> None:
    """A killed server is a row with the reason, and changes the exit code."""
    values = json_output("fleet", "status", *listed(fleet), "--interval", "0.1", code=1)
    assert set(values) == {"servers", "total"}
    assert [set(row) for row in values["servers"]] == [FIGURES] * 3
    first, killed, last = values["servers"]
    assert [row["server"] for row in values["servers"]] == [server.tcp for server in fleet]
    assert (first["state"], first["engines"], first["sessions"]) == ("ok", 1, 1)
    assert first["memory_used_bytes"] == 3 * PART
    assert (first["lookup_keys"], first["lookup_misses"]) == (5, 1)
    assert first["hit_rate"] == pytest.approx(4 / 5)
    assert killed["state"] == "unreachable"
    assert "no server answers" in killed["reason"]
    assert {killed[name] for name in FIGURES - {"server", "state", "reason", "shared_tiers"}} == {None}
    assert last["state"] == "trouble"
    [shared] = last["shared_tiers"]
    assert (shared["name"], shared["type"], shared["healthy"]) == ("valkey", "valkey", False)
    assert shared["trouble"] in last["reason"]
    total = values["total"]
    assert (total["servers"], total["answering"], total["engines"]) == (3, 2, 1)
    assert total["versions"] == [first["version"]]
    assert total["hit_rate"] == first["hit_rate"]
    assert total["memory_capacity_bytes"] == 2 * first["memory_capacity_bytes"]


def test_the_table_has_a_total_and_the_reasons(fleet: list[ServerProcess]) -> None:
    done = kvtier("fleet", "status", *listed(fleet), "--interval", "0.1", code=1)
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == [*(server.tcp for server in fleet), "total"]
    assert "2 of 3 answer" in rows[-1]
    assert "valkey trouble" in rows[2]
    assert f"no server answers at {fleet[1].tcp}" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(("places", "code"), [((0, 2), 0), ((1,), 2)])
def test_the_exit_code_says_whether_all_or_none_answer(
    fleet: list[ServerProcess], places: tuple[int, ...], code: int
) -> None:
    kvtier("fleet", "status", *listed([fleet[place] for place in places]), "--interval", "0.1", code=code)


def test_top_prints_rates_without_a_terminal(fleet: list[ServerProcess]) -> None:
    """One line of JSON per interval. The hit rate is that of the interval."""
    done = kvtier("fleet", "top", *listed(fleet[::2]), "--interval", "0.1", "--count", "2", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2
    assert {set(line) == {"servers", "total"} for line in lines} == {True}
    assert (lines[1]["total"]["lookup_keys_per_s"], lines[1]["total"]["hit_rate"]) == (0, None)
    assert lines[1]["servers"][0]["lookup_keys"] == 5


def test_credentials_that_cannot_be_used_are_a_reason(fleet: list[ServerProcess], tmp_path: Path) -> None:
    """A token is not sent over TCP without TLS. The Unix socket accepts it."""
    token = tmp_path / "token"
    token.write_text("kvt_secret")
    servers = f"{fleet[0].tcp},{fleet[0].endpoint}"
    arguments = ("--servers", servers, "--token-file", str(token), "--interval", "0.1")
    values = json_output("fleet", "status", *arguments, code=1)
    assert [row["state"] for row in values["servers"]] == ["refused", "ok"]
    assert "without TLS" in values["servers"][0]["reason"]


@pytest.mark.slow
def test_a_server_that_hangs_is_a_row(tmp_path: Path, fleet: list[ServerProcess]) -> None:
    with ServerProcess(tmp_path).start(backed=False) as hanging:
        hanging.suspend()
        try:
            servers = f"{hanging.endpoint},{fleet[0].endpoint}"
            flags = ("--servers", servers, "--timeout", "5", "--interval", "0.1")
            values = json_output("fleet", "status", *flags, code=1)
        finally:
            hanging.resume()
    assert [row["state"] for row in values["servers"]] == ["unreachable", "ok"]
    assert "no answer" in values["servers"][0]["reason"]


def test_names_of_a_server_are_escaped(tmp_path: Path) -> None:
    """A server of another program can answer with any text, and without tiers."""

    class Admin(admin_pb2_grpc.AdminServiceServicer):
        def GetStatus(self, *_: Any) -> admin_pb2.GetStatusResponse:  # noqa: N802
            broken = admin_pb2.TierStatus(name=HOSTILE, type=HOSTILE, trouble=HOSTILE, shared=True)
            return admin_pb2.GetStatusResponse(server_version=HOSTILE, tiers=[broken] if with_tier else [])

    server = grpc.server(ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(), server)
    server.add_insecure_port(f"unix:{tmp_path}/fake")
    server.start()
    try:
        for with_tier in (True, False):  # noqa: B007 - `Admin` reads it
            for action in ("status", "top --once"):
                flags = ("--servers", f"unix:{tmp_path}/fake", "--interval", "0.1")
                done = kvtier("fleet", *action.split(), *flags)
                assert_harmless(done.stdout + done.stderr)
                assert SHOWN in done.stdout
    finally:
        server.stop(0).wait()


def test_a_name_stands_for_all_its_addresses() -> None:
    """Each address once, sorted by number, IPv4 first. TLS verifies the name."""
    lookup = resolver("10.0.0.10", "fd00::2", "10.0.0.9", "10.0.0.10")
    found = find_servers(chosen(dns="kvtier.kv.svc:7450"), lookup)
    assert [f"{endpoint}" for endpoint in found] == ["10.0.0.9:7450", "10.0.0.10:7450", "[fd00::2]:7450"]
    assert {endpoint.tls_name for endpoint in found} == {"kvtier.kv.svc"}


def fails(*_: Any, **__: Any) -> list[Any]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize(
    ("values", "lookup", "complaint"),
    [
        ({"dns": "kvtier:7450"}, fails, "--dns: kvtier cannot be resolved: Name or service not known"),
        ({"dns": "kvtier:7450"}, resolver(), "--dns: kvtier has no addresses"),
        ({"dns": "unix:/s"}, fails, "--dns: 'unix:/s' is not NAME:PORT"),
        ({"dns": "kvtier"}, fails, "--dns: 'kvtier' is neither unix:PATH nor HOST:PORT"),
        ({"servers": "a:1,b"}, fails, "'b' is neither"),
        ({"servers": "a:0"}, fails, "a:0: a server has no port 0"),
        ({"servers": " , "}, fails, "no servers are listed"),
        ({"file": "/none"}, fails, "/none: No such file or directory"),
    ],
)
def test_unknown_servers_are_an_error(values: dict[str, str], lookup: Callable[..., Any], complaint: str) -> None:
    with pytest.raises(FleetError) as refused:
        find_servers(chosen(**values), lookup)
    assert complaint in f"{refused.value}"


def test_a_file_lists_servers(tmp_path: Path) -> None:
    """In its order, each once; comments and empty lines are ignored."""
    file = tmp_path / "servers"
    file.write_text("# hosts\nb:2\n\n  a:1  # first rack\nb:2\nunix:/run/kvtier/kvtier.sock\n")
    found = find_servers(chosen(file=str(file)))
    assert [f"{endpoint}" for endpoint in found] == ["b:2", "a:1", "unix:/run/kvtier/kvtier.sock"]
    file.write_bytes(b"\xff\n")
    with pytest.raises(FleetError, match="the file is not text"):
        find_servers(chosen(file=str(file)))
    file.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(FleetError, match="more than 1,048,576 bytes"):
        find_servers(chosen(file=str(file)))


@pytest.mark.parametrize(
    "arguments", [(), ("--servers", "a:1", "--dns", "b:1"), ("--servers", "a"), ("--file", f"/none{HOSTILE}")]
)
@pytest.mark.parametrize("action", ["status", "drain", "top"])
def test_wrong_usage_exits_with_2(action: str, arguments: tuple[str, ...]) -> None:
    """The message is escaped."""
    done = kvtier("fleet", action, *arguments, code=2)
    assert_harmless(done.stderr)


def test_tls_verifies_the_name_that_was_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of the server need not be in its certificate; the name must be."""
    authority = Authority(tmp_path)
    pair = authority.issue("server", dns="kvtier.test")
    tls = f"[tls]\ncert = '{pair.cert}'\nkey = '{pair.key}'\nclient_ca = '{authority.ca}'\n"
    own = authority.issue("client")
    for name, path in (("CA", authority.ca), ("CERT", own.cert), ("KEY", own.key)):
        monkeypatch.setenv(f"KVTIER_{name}", path)
    with ServerProcess(tmp_path, tcp=True, insecure=False, config=tls).start(backed=False) as server:
        port = server.tcp.rpartition(":")[2]
        for name, state in (("kvtier.test", "ok"), ("other.test", "unreachable")):
            with Fleet(find_servers(chosen(dns=f"{name}:{port}"), resolver("127.0.0.1")), 20.0) as fleet:
                fleet.ask()
                fleet.wait()
                [row] = fleet.values()["servers"]
            assert row["state"] == state, row["reason"]
        assert "certificate is not for other.test" in row["reason"]


def test_servers_that_appear_and_vanish(fleet: list[ServerProcess]) -> None:
    """A server that stays keeps its figures."""
    endpoints = find_servers(chosen(servers=",".join(server.endpoint for server in fleet)))
    with Fleet(endpoints[:2], 20.0, live=True) as view:
        for _ in range(2):
            view.ask()
            view.wait()
        assert list(view.values()["samples"]) == [fleet[0].endpoint]
        view.replace([endpoints[2], endpoints[0]])
        values = view.values()
        assert [row["state"] for row in values["servers"]] == ["waiting", "ok"]
        assert list(values["samples"]) == [fleet[0].endpoint]


def test_the_screen_shows_all_servers(fleet: list[ServerProcess]) -> None:
    """On a terminal of 80 x 24, with the keys of `kvtier top`."""
    with Terminal("fleet", "top", *listed(fleet)) as terminal:
        terminal.wait(lambda text: "2 of 3 servers answer" in text and "unreachable" in text and "e-0" not in text)
        assert f"! no server answers at {fleet[1].tcp}" in terminal.text
        assert len(terminal.rows()) == 3
        terminal.press("3", lambda text: SHOWN[:9] in text)
        terminal.press("2", lambda text: "lmdb" in text and "valkey" in text)
        terminal.press("1", lambda text: "server▲" in text)
        terminal.press("\x1b[F\r", lambda text: "shared tiers" in text and "valkey trouble" in text)
        terminal.press("q", lambda _: True)
        assert terminal.wait_end() == 0
        assert terminal.is_restored()


def test_the_first_rates_do_not_wait_for_an_interval(fleet: list[ServerProcess]) -> None:
    """The table of tiers is empty until there are rates, of `kvtier top` as well."""
    for command in (("fleet", "top", "--servers", fleet[0].endpoint), ("top", "--endpoint", fleet[0].endpoint)):
        with Terminal(*command, interval="3600") as terminal:
            terminal.wait(lambda text: "keys/s" in text)
            terminal.press("2" if command[0] == "fleet" else "1", lambda text: "lmdb" in text)
            terminal.press("q", lambda _: True)


@pytest.mark.parametrize("columns", [1, 20, 80, 200])
@pytest.mark.parametrize("lines", [1, 6, 24])
def test_every_size_is_filled_exactly(fleet: list[ServerProcess], columns: int, lines: int) -> None:
    """No line is longer than the terminal, also with many servers in trouble."""
    answer = status.values(fleet[0].status())
    look = rates(answer, answer, 1.0)
    problem = {"state": "unreachable", "reason": HOSTILE}
    rows = [server_row("a:1", answer, look, live=True, problem={})]
    rows += [server_row(f"b-{number}:1", None, None, live=True, problem=problem) for number in range(40)]
    screen = FleetScreen(Console(), "41 servers")
    screen.sample = fleet_values(rows, live=True) | {"samples": {"a:1": look}}
    for key in ("1", "2", "3", "enter", "end", "home", "right"):
        screen.press(key)
        text = screen.render(columns, lines).plain
        shown = text.split("\n")
        assert len(shown) == lines
        assert not [character for character in text if character != "\n" and unicodedata.category(character)[0] == "C"]
        if columns >= 80:
            assert max(map(cell_len, shown)) <= columns
    if (columns, lines) == (80, 24):
        screen.press("1")
        assert "37 more servers have problems" in screen.render(columns, lines).plain


def test_each_figure_has_a_column_with_text(fleet: list[ServerProcess]) -> None:
    """Also for a server that does not answer."""
    answer = status.values(fleet[0].status())
    rows = [
        server_row("a:1", answer, rates(answer, answer, 1.0), live=False, problem={}),
        server_row("b:1", None, None, live=False, problem={"state": "waiting", "reason": ""}),
    ]
    for row in rows:
        assert all(column.text(row) for column in SERVERS.columns)
    assert Endpoint(host="a", port=1) == Endpoint(host="a", port=1, tls_name="")


def test_the_hit_rate_of_the_total_is_weighted() -> None:
    """A server with more lookups counts more; a server without lookups does not count."""
    answer = status.values(admin_pb2.GetStatusResponse(lookup_keys=10, lookup_misses=5))
    idle = status.values(admin_pb2.GetStatusResponse())
    busy = status.values(admin_pb2.GetStatusResponse(lookup_keys=90, lookup_misses=0))
    rows = [
        server_row(name, each, None, live=False, problem={})
        for name, each in zip("abc", (answer, idle, busy), strict=True)
    ]
    assert fleet_values(rows, live=False)["total"]["hit_rate"] == pytest.approx(95 / 100)
    live = [
        row | {"lookup_keys_per_s": keys, "hit_rate": rate}
        for row, keys, rate in zip(rows, (10, 0, 30), (0.5, None, 0.9), strict=True)
    ]
    assert fleet_values(live, live=True)["total"]["hit_rate"] == pytest.approx((5 + 27) / 40)


def test_the_screen_waits_for_no_server(fleet: list[ServerProcess]) -> None:
    """Rows appear when they arrive; the number of samples counts intervals of all servers."""
    with Fleet(find_servers(chosen(servers=fleet[0].endpoint)), 20.0, live=True) as view:
        screen = FleetScreen(Console(), "1 server")
        for wanted in (0, 0, 1):
            view.ask()
            assert (view.samples, view.waiting) == (wanted, False)
            wait_until(lambda: view.take(screen))
        assert screen.sample is not None
        assert screen.sample["servers"][0]["state"] == "ok"
