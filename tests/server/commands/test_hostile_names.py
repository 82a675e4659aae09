"""Names that clients choose cannot control the terminal of an operator."""

from __future__ import annotations

import contextlib
import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.command_line import json_output, kvtier
from harness.payloads import key_of, namespace_of, payload
from harness.server_process import ServerProcess

from kvtier.client import Client, HoldName
from kvtier.server.commands import console
from kvtier.server.commands.admin_client import plain_console
from kvtier.server.commands.tables import ResponsiveTable
from kvtier.server.printable import printable

PART = 64 << 10
HOSTILE = "a\x1b[2Jb\x9bc\u202ed\u2028e\u200bfg\nh\u3164i"
SHOWN = r"a\x1b[2Jb\x9bc\u202ed\u2028e\u200bfg\nh\u3164i"
COMMANDS = (
    "status",
    "tiers",
    "sessions",
    "leases",
    "handoffs",
    "conversations list",
    "explain",
    "top --once --interval 0.2",
    "doctor",
)


def assert_harmless(text: str) -> None:
    """Text has no character that changes or hides other text; newlines end lines."""
    bad = [character for character in text if character != "\n" and unicodedata.category(character)[0] in "CZ"]
    assert set(bad) <= {" "}, ascii(text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yields a server with a session, a lease, a hold and a tenant of hostile names."""
    namespace = namespace_of(PART, model=f"model {HOSTILE}", tenant=f"tenant {HOSTILE}")
    tenant = json.dumps(namespace.tenant)
    config = f"[tenants.{tenant}]\nquota = '10%'\n"
    with ServerProcess(tmp_path_factory.mktemp("s"), config=config).start() as server, contextlib.ExitStack() as stack:
        client = stack.enter_context(
            Client(server.endpoint, namespace=namespace, name=f"client {HOSTILE}", engine_id=f"engine {HOSTILE}")
        )
        client.wait_until_connected(60)
        keys = [key_of(0)]
        client.store(keys, [payload(keys[0], PART)])
        request = f"request {HOSTILE}"
        client.publish(request, keys, [0], num_tokens=16, hold_for=60)
        stack.enter_context(client.claim(HoldName(client.engine_id, request), request_id=request))
        stack.enter_context(client.lookup(keys, request_id=request))
        client.begin_request("r", keys, conversation_id=f"conversation {HOSTILE}").release()
        yield server


@pytest.mark.parametrize("command", COMMANDS)
def test_names_of_clients_are_escaped_in_the_output(server: ServerProcess, command: str) -> None:
    """The output has no control, format or separator characters besides spaces and newlines."""
    words = command.split()
    if words == ["explain"]:
        words.append(f"request {HOSTILE}")
    # `doctor` examines the whole machine, where other tests run at the same time.
    done = kvtier(*words, "--endpoint", server.endpoint, code=None if command == "doctor" else 0)

    assert_harmless(done.stdout + done.stderr)
    if command not in ("tiers", "doctor"):
        assert SHOWN in done.stdout


def test_json_has_the_name_as_the_client_sent_it(server: ServerProcess) -> None:
    """JSON escapes the characters itself, so that programs read the exact name."""
    [session] = json_output("sessions", "--endpoint", server.endpoint)["sessions"]

    assert session["client_name"] == f"client {HOSTILE}"
    assert session["model"] == f"model {HOSTILE}"


@pytest.mark.parametrize(
    "character", ["\x07", "\x1b", "\x7f", "\x85", "\u061c", "\u180b", "\u2029", "\u2066", "\ufeff", "\ufe0f"]
)
def test_a_character_without_a_glyph_is_escaped(character: str) -> None:
    escape = character.encode("unicode_escape").decode()

    assert printable(f"x{character}y") == f"x{escape}y"


@pytest.mark.parametrize("text", ["", "engine-0", "Ω 模型 é \\x1b", "[red]x[/red]"])
def test_other_text_is_not_changed(text: str) -> None:
    assert printable(text) == text


def test_a_table_counts_the_width_of_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns stay aligned, and names are no markup."""
    table = ResponsiveTable("client", numbers=("calls",))
    table.add_row("[red]x\x1b", "1")
    table.add_row("y", "2")

    plain_console().print(table)

    rows = capsys.readouterr().out.splitlines()
    assert len({len(row) for row in rows}) == 1
    assert r"[red]x\x1b" in rows[3]


def test_errors_of_a_command_are_escaped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An error can quote a name that a client or a file has."""
    console.refuse([f"{tmp_path.name}: no request {HOSTILE}"], 1)

    assert capsys.readouterr().err == f"kvtier: error: {tmp_path.name}: no request {SHOWN}\n"
