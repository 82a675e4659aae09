"""Commands against a real server: output as text and JSON, and exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.command_line import json_output, kvtier
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, KVTierError, StoreStatus
from kvtier.server import cli
from kvtier.server.commands import console

PART = 64 << 10
ASK = (
    "status",
    "top",
    "tiers",
    "sessions",
    "leases",
    "handoffs",
    "conversations list",
    "explain r",
    "evict --all",
    "drain",
    "fsck --online",
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yields a server with a disk tier; tests must leave its blocks in place."""
    with ServerProcess(tmp_path_factory.mktemp("s")).start() as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path).start() as server:
        yield server


def client_of(server: ServerProcess, tenant: str = "", name: str = "unit") -> Client:
    client = Client(server.endpoint, namespace=namespace_of(PART, tenant=tenant), name=name, engine_id=f"e-{name}")
    client.wait_until_connected(60)
    return client


def store(client: Client, *numbers: int) -> list[bytes]:
    """Stores blocks in all tiers; returns their keys."""
    keys = [key_of(number) for number in numbers]
    assert set(client.store(keys, [payload(key, PART) for key in keys])) == {StoreStatus.GRANTED}
    client.flush(keys)
    return keys


def ask(server: ServerProcess, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a command against a server."""
    return kvtier(*arguments, "--endpoint", server.endpoint, code=code)


@pytest.mark.parametrize("command", ASK)
def test_an_unreachable_server_or_invalid_address_exits_with_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is one line."""
    for endpoint, words in ((f"unix:{tmp_path}/none", "no server answers at"), ("nonsense", "neither unix:PATH nor")):
        assert cli.main([*command.split(), "--endpoint", endpoint, "--timeout", "2"]) == console.EXIT_UNREACHABLE
        said = capsys.readouterr()
        assert words in said.err
        assert (said.out, said.err.count("\n")) == ("", 1)


def test_tiers_are_listed(shared: ServerProcess) -> None:
    """Columns: fill, hits, queues, shares of tenants, and memory."""
    # the last bytes are backed after the first calls
    shared.wait_for(lambda status: status.region.backed_bytes == 64 * MIB)
    answer = json_output("tiers", "--endpoint", shared.endpoint)
    assert [tier["name"] for tier in answer["tiers"]] == ["cpu", "lmdb"]
    assert {"queued_bytes", "dropped_blocks", "declined", "hit_rate", "shares"} <= set(answer["tiers"][1])
    region = answer["region"]
    assert region["size_bytes"] == region["backed_bytes"] == 64 * MIB
    assert 0 <= region["huge_bytes"] <= 64 * MIB
    text = ask(shared, "tiers").stdout
    for piece in ("cpu", "lmdb", "queued", "(the rest)", "disk free", "64.0 MiB of 64.0 MiB backed"):
        assert piece in text


def test_sessions_are_listed(shared: ServerProcess) -> None:
    """Columns: engine, age, process, transport, leases, and the time of the last heartbeat."""
    shared.wait_for(lambda status: not status.sessions)
    with client_of(shared, tenant="acme", name="sess") as client:
        keys = store(client, *range(100, 103))
        with client.lookup(keys), client.write([key_of(110), key_of(111)]):
            [session] = json_output("sessions", "--endpoint", shared.endpoint)["sessions"]
            text = ask(shared, "sessions").stdout
    assert (session["client_name"], session["engine_id"], session["pid"]) == ("sess", "e-sess", os.getpid())
    assert (session["tenant"], session["transport"], session["attached"]) == ("acme", "shm", True)
    assert (session["leases"], session["leased_blocks"]) == (1, 3)
    assert (session["stores"], session["storing_bytes"]) == (1, 2 * PART)
    assert 0 <= session["idle_seconds"] <= session["age_seconds"] < 60
    assert session["calls"] >= 3
    assert len(bytes.fromhex(session["namespace_id"])) == 32
    for piece in ("sess", "e-sess", str(os.getpid()), "shm", "acme", "3 blocks"):
        assert piece in text
    shared.wait_for(lambda status: not status.sessions)
    assert ask(shared, "sessions").stdout == "no sessions\n"


def test_the_status_describes_the_server_process(shared: ServerProcess) -> None:
    """Process, protocol, region, and delay of the event loop."""
    answer = json_output("status", "--endpoint", shared.endpoint)
    assert (answer["pid"], answer["protocol_versions"]) == (shared.pid, [2])
    assert 0 <= answer["loop_lag_seconds"] < 30
    assert answer["region"]["size_bytes"] == 64 * MIB


class TestEvict:
    def test_reports_bytes_and_keeps_pinned_blocks(self, server: ServerProcess) -> None:
        """A dry run changes nothing.

        Then a tier keeps only pinned blocks, and the tier below serves the rest.
        """
        arguments = ("evict", "--tier", "cpu", "--all", "--endpoint", server.endpoint)
        assert "--all cannot be combined with --tier" in kvtier(*arguments, code=2).stderr
        arguments = ("evict", "--tier", "cpu", "--endpoint", server.endpoint)
        with client_of(server) as client:
            keys = store(client, *range(10))
            with client.lookup(keys[:2]):
                dry = json_output(*arguments, "--dry-run")
                assert json_output("tiers", "--endpoint", server.endpoint)["tiers"][0]["blocks"] == 10
                wet = json_output(*arguments)
            tier = {"tier": "cpu", "blocks": 8, "bytes": 8 * PART, "kept_blocks": 2, "kept_bytes": 2 * PART}
            assert dry == {"dry_run": True, "done": True, "tiers": [tier]}
            assert wet == {"dry_run": False, "done": True, "tiers": [tier]}
            cpu, lmdb = json_output("tiers", "--endpoint", server.endpoint)["tiers"]
            assert (cpu["blocks"], cpu["evictions"], lmdb["blocks"]) == (2, 8, 10)
            assert_serves(client, keys)
        text = ask(server, "evict", "--all").stdout
        for piece in ("evicted", "kept", "cpu", "lmdb", "10 blocks", "640.0 KiB"):
            assert piece in text
        assert [tier["blocks"] for tier in json_output("tiers", "--endpoint", server.endpoint)["tiers"]] == [0, 0]

    def test_conditions_select_blocks(self, server: ServerProcess) -> None:
        """Tenant, namespace, age and bytes; a block that has left every tier is a miss."""

        def gone(*conditions: str) -> list[int]:
            answer = json_output("evict", *conditions, "--endpoint", server.endpoint)
            return [tier["blocks"] for tier in answer["tiers"]]

        with client_of(server, "alice", "alice") as alice, client_of(server, "bob", "bob") as bob:
            keys, others = store(alice, *range(6)), store(bob, *range(4))
            sessions = json_output("sessions", "--endpoint", server.endpoint)["sessions"]
            [namespace] = [each["namespace_id"] for each in sessions if each["tenant"] == "bob"]
            assert gone("--older-than", "1h") == [0, 0]
            assert gone("--tenant", "unknown") == [0, 0]
            assert gone("--namespace", namespace, "--tier", "lmdb") == [4]
            assert gone("--tenant", "alice", "--bytes", f"{2 * PART}") == [2, 2]
            evicted: Counter[int] = Counter()

            def all_gone() -> bool:
                evicted.update(dict(enumerate(gone("--older-than", "1s", "--tenant", "alice"))))
                return evicted == {0: 4, 1: 4}

            wait_until(all_gone)
            assert alice.lookup(keys, prefix=False).id == 0
            assert_serves(bob, others)

    def test_retained_blocks_stay_without_the_flag(self, server: ServerProcess) -> None:
        """Retention by a request overrides an eviction by an operator without --retained."""
        with client_of(server) as client:
            keys = [key_of(1)]
            client.store(keys, [payload(keys[0], PART)], retain_for=600)
            client.flush(keys)
            for flags, blocks in (((), 0), (("--retained",), 1)):
                answer = json_output("evict", "--tier", "cpu", *flags, "--endpoint", server.endpoint)
                assert answer["tiers"][0]["blocks"] == blocks

    def test_a_progress_bar_is_drawn_on_terminals_only(self, shared: ServerProcess) -> None:
        """The bar goes to standard error; the answer stays one JSON document."""
        command = [sys.executable, "-m", "kvtier.server", "evict", "--all", "--dry-run", "--json"]
        leader, follower = pty.openpty()
        try:
            done = subprocess.run(
                [*command, "--endpoint", shared.endpoint],
                stdout=subprocess.PIPE,
                stderr=follower,
                check=True,
                timeout=60,
            )
            drawn = _read(leader)
        finally:
            os.close(follower)
            os.close(leader)
        assert json.loads(done.stdout)["done"]
        assert b"evict" in drawn
        assert ask(shared, "evict", "--all", "--dry-run").stderr == ""

    @pytest.mark.parametrize(
        ("flags", "code", "words"),
        [
            ((), 2, "or --all"),
            (("--tier", "tape"), 1, "there is no tier 'tape'; the tiers are cpu, lmdb"),
            (("--namespace", "xyz"), 2, "32 hexadecimal digits"),
            (("--namespace", "abcd"), 1, "namespace_id has 2 bytes; it must have 32"),
            (("--older-than", "soon"), 2, "not a duration"),
            (("--bytes", "lots"), 2, "not a size"),
            (("--bytes", "0"), 2, "must be more than 0"),
        ],
    )
    def test_invalid_conditions_are_refused(
        self, shared: ServerProcess, flags: tuple[str, ...], code: int, words: str
    ) -> None:
        """The error is one line."""
        assert words in ask(shared, "evict", *flags, code=code).stderr


class TestDrain:
    def test_drain_ends_the_server_as_a_signal_does(self, server: ServerProcess) -> None:
        """The server exits with 0, and the next one serves the blocks that fit."""
        with client_of(server) as client:
            keys = [key_of(number) for number in range(20)]
            client.store(keys, [payload(key, PART) for key in keys])
            answer = json_output("drain", "--wait", "--endpoint", server.endpoint)
        assert (answer["mode"], answer["complete"], answer["ended"]) == ("end", True, True)
        assert server.wait() == 0
        server.start()
        with client_of(server) as client:
            assert_serves(client, keys)

    def test_without_wait_the_command_returns_at_once(self, server: ServerProcess) -> None:
        """The server finishes the drain by itself."""
        assert "refuses new work" in ask(server, "drain").stdout
        assert server.wait() == 0

    def test_a_drained_server_can_resume(self, server: ServerProcess) -> None:
        """While drained, it refuses stores and sessions and serves lookups."""
        with client_of(server) as client:
            keys = store(client, 0, 1)
            answer = json_output("drain", "--stay", "--wait", "--endpoint", server.endpoint)
            assert (answer["mode"], answer["done"], answer["complete"], answer["ended"]) == ("stay", True, True, False)
            assert json_output("status", "--endpoint", server.endpoint)["draining"]
            with pytest.raises(KVTierError), client.write([key_of(9)]):
                pass
            assert_serves(client, keys)
            assert "is drained" in ask(server, "drain", "--stay", "--wait").stdout, "twice is once"
            assert ask(server, "drain", "--undo").stdout == "the server accepts new work again\n"
            assert not json_output("status", "--endpoint", server.endpoint)["draining"]
            client.wait_until_connected(60)
            store(client, 9)
        assert server.terminate() == 0

    def test_stay_and_undo_exclude_each_other(self) -> None:
        """The command exits with 2."""
        assert "not allowed with" in kvtier("drain", "--stay", "--undo", code=2).stderr


class TestCompletion:
    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_every_command_is_completed(self, shell: str) -> None:
        """The script has all commands and their flags."""
        script = kvtier("completion", shell).stdout
        for word in ("evict", "doctor", "drain", "sessions", "older-than"):
            assert word in script

    def test_bash_completes(self, tmp_path: Path) -> None:
        """A real bash completes commands, and flags of a command."""
        (tmp_path / "kvtier.bash").write_text(kvtier("completion", "bash").stdout)
        script = (
            f"source {tmp_path}/kvtier.bash\n"
            'complete_() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); '
            '$(complete -p kvtier | sed \'s/.*-F \\([^ ]*\\).*/\\1/\') kvtier "${@: -1}" "${@: -2:1}"; echo "${COMPREPLY[@]}"; }\n'
            "complete_ kvtier do\ncomplete_ kvtier evict --dry\n"
        )
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60)
        assert done.stdout.split() == ["doctor", "--dry-run"], done

    def test_an_unknown_shell_is_wrong_usage(self) -> None:
        kvtier("completion", "tcl", code=2)


def _read(descriptor: int) -> bytes:
    """Returns the available output of a terminal; an empty text after its other end is closed."""
    with contextlib.suppress(OSError):
        return os.read(descriptor, 1 << 16) if select.select([descriptor], [], [], 0.1)[0] else b""
    return b""
