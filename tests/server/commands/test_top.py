"""`kvtier top`: rates, and its screen in a real terminal and for terminals of any size."""

from __future__ import annotations

import contextlib
import copy
import json
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.command_line import json_output, kvtier
from harness.payloads import filled, key_of, namespace_of, payload
from harness.server_process import ServerProcess
from harness.terminal import SHELL, Terminal
from rich.cells import cell_len
from rich.console import Console

from kvtier.client import Client
from kvtier.server.commands.rates import rates
from kvtier.server.commands.top_screen import TopScreen
from kvtier.server.commands.top_views import VIEWS
from kvtier.server.telemetry import status

PART = 64 << 10
SESSIONS = 30
LONG = "a-tenant-with-a-name-of-more-than-forty-characters"
SECONDS = 60
RIGHT, DOWN, PAGE_UP, PAGE_DOWN, END, HOME = "\x1b[C", "\x1b[B", "\x1b[5~", "\x1b[6~", "\x1b[F", "\x1bOH"
BACKTAB, ESCAPE, ENTER = "\x1b[Z", "\x1b", "\r"
HEADS = {"tiers": "tier▲", "tenants": "tenant", "sessions": "client", "hand-offs": "engine"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yields a server with 30 sessions of two tenants, and two held requests."""
    config = f"[tenants.acme]\nquota = '20%'\n[tenants.{LONG}]\nquota = '10%'\n"
    with ServerProcess(tmp_path_factory.mktemp("s"), config=config).start() as server, contextlib.ExitStack() as stack:
        for number in range(SESSIONS):
            namespace = namespace_of(PART, tenant=("acme", LONG)[number % 2], model="a model")
            name = f"client-{number:02}"
            client = stack.enter_context(Client(server.endpoint, namespace=namespace, name=name, engine_id=f"e-{name}"))
            client.wait_until_connected(SECONDS)
            if number < 2:
                keys = [key_of(number)]
                client.store(keys, [payload(keys[0], PART)])
                client.publish(f"request-{number}", keys, [0], num_tokens=16, hold_for=600)
        yield server


@pytest.fixture
def terminal(shared: ServerProcess) -> Iterator[Terminal]:
    """Yields a terminal of 80 x 24 that shows the first view."""
    with Terminal("top", "--endpoint", shared.endpoint) as terminal:
        terminal.wait(lambda text: "tier▲" in text)
        yield terminal


def _status(server: ServerProcess) -> dict[str, Any]:
    return status.values(server.status())


def test_rates_of_an_interval(shared: ServerProcess) -> None:
    """Rates are per second between two readings; a ratio without lookups is empty."""
    with Client(shared.endpoint, namespace=namespace_of(PART), name="top", engine_id="e-top") as client:
        client.wait_until_connected(SECONDS)
        keys = [key_of(200)]
        before = _status(shared)
        client.store(keys, [payload(keys[0], PART)])
        client.flush(keys)
        client.lookup([*keys, key_of(201)], prefix=False).release()
        client.load(keys, filled(1, PART))
        look = rates(before, _status(shared), 0.5)
        idle = json_output("top", "--once", "--interval", "0.2", "--endpoint", shared.endpoint)
    assert (look["lookup_keys_per_s"], look["hit_rate"]) == (6, pytest.approx(2 / 3))
    cpu, lmdb = look["tiers"]
    assert (cpu["hits_per_s"], cpu["misses_per_s"], cpu["hit_rate"]) == (4, 2, 2 / 3)
    assert (lmdb["hits_per_s"], lmdb["misses_per_s"], lmdb["hit_rate"]) == (0, 2, 0)
    assert (cpu["stored_bytes_per_s"], cpu["loaded_bytes_per_s"]) == (2 * PART, 2 * PART)
    assert (lmdb["stored_bytes_per_s"], lmdb["loaded_bytes_per_s"]) == (2 * PART, 0)
    session = look["sessions"][0]
    assert (session["engine_id"], session["calls_per_s"] >= 8) == ("e-top", True)
    assert {share["tenant"] for share in look["tenants"]} == {"", "acme", LONG}
    [held, _] = look["handoffs"]
    assert (held["direction"], held["open"], held["published_per_s"]) == ("prefill_to_decode", 2, 0)
    assert (idle["lookup_keys_per_s"], idle["hit_rate"]) == (0, None)
    command = [sys.executable, "-m", "kvtier.server", "top", "--json", "--interval", "2", "--count", "1"]
    done = subprocess.run(
        [*command, "--endpoint", shared.endpoint], capture_output=True, text=True, check=True, timeout=60
    )
    [line] = done.stdout.splitlines()
    assert 1.9 <= json.loads(line)["interval_seconds"] < 20


def test_tables_follow_each_other_without_a_terminal(shared: ServerProcess) -> None:
    """The output has no escape sequences, and says how many sessions it leaves out."""
    text = kvtier("top", "--interval", "0.1", "--count", "2", "--endpoint", shared.endpoint).stdout
    assert text.count("keys/s looked up") == 2
    for piece in ("loop lag", "(the rest)", LONG, "e-client-00", "calls/s", "20 of 30", "prefill to decode: 2 held"):
        assert piece in text
    assert "\x1b" not in text


def test_an_invalid_interval_is_wrong_usage(shared: ServerProcess) -> None:
    assert "--interval" in kvtier("top", "--interval", "0", "--endpoint", shared.endpoint, code=2).stderr


def test_every_view_is_reachable(terminal: Terminal) -> None:
    """By its number, by Tab and by Shift-Tab."""
    expected = {"tiers": "lmdb", "tenants": "acme", "sessions": "client-00", "hand-offs": "request-0"}
    for number, (view, row) in enumerate(expected.items(), start=1):
        terminal.press(f"{number}", lambda text, view=view, row=row: f"{HEADS[view]}" in text and row in text)
    for key, views in (("\t", [*expected][1:]), (BACKTAB, [*reversed([*expected])][1:])):
        terminal.press("1" if key == "\t" else "4", lambda text: "lmdb" in text or "request-0" in text)
        for view in views:
            terminal.press(key, lambda text, view=view: expected[view] in text)


def test_all_rows_are_reachable_by_scrolling(terminal: Terminal) -> None:
    """Page by page; End and Home show the last and the first row."""
    names = {f"client-{number:02}" for number in range(SESSIONS)}
    terminal.press("3", lambda text: "client-00" in text)
    terminal.press(RIGHT, lambda text: "leases▼" in text)
    seen = {row.split()[0] for row in terminal.rows()}
    assert seen < names
    terminal.press(PAGE_DOWN + PAGE_DOWN, lambda text: f"-{SESSIONS} of {SESSIONS}" in text)
    seen |= {row.split()[0] for row in terminal.rows()}
    assert seen == names
    terminal.press(HOME, lambda text: "rows 1-" in text)
    terminal.press(END, lambda text: f"-{SESSIONS} of {SESSIONS}" in text)
    terminal.press(PAGE_UP + PAGE_UP, lambda text: "rows 1-" in text)


def test_the_order_follows_the_sort_keys(terminal: Terminal) -> None:
    """The arrow keys choose the column, also one beyond the screen; `r` reverses the order."""
    terminal.press("3", lambda text: "calls/s▼" in text)
    columns = [column.name for column in VIEWS[2].columns]
    order = [*columns[columns.index("calls/s") + 1 :], *columns[: columns.index("calls/s")]]
    for name in order:
        terminal.press(RIGHT, lambda text, name=name: f"{name}▼" in text or f"{name}▲" in text)
    terminal.press("\x1b[D\x1b[D", lambda text: "client▲" in text)
    terminal.wait(lambda _: terminal.rows()[0].startswith("client-00"))
    terminal.press("r", lambda text: "client▼" in text and terminal.rows()[0].startswith("client-29"))
    names = [row.split()[0] for row in terminal.rows()]
    assert names == sorted(names, reverse=True)


def test_details_show_complete_names(terminal: Terminal) -> None:
    """The table cuts a long name with an ellipsis."""
    terminal.press("2", lambda text: "a-tenant-with" in text)
    assert LONG not in terminal.text
    assert "…" in terminal.text
    while LONG[:10] not in next(line for line in terminal.screen.display if _is_reversed(terminal, line)):
        selected = _selected(terminal)
        terminal.press(DOWN, lambda _, selected=selected: _selected(terminal) != selected)
    terminal.press(ENTER, lambda text: LONG in text)
    for column in VIEWS[1].columns:
        assert f"\n{column.name}" in terminal.text
    terminal.press(ESCAPE, lambda text: "rows 1-" in text)


def _selected(terminal: Terminal) -> int:
    """Returns the line of the selected row."""
    buffer, lines = terminal.screen.buffer, terminal.screen.lines
    return max((number for number in range(lines) if buffer[number][0].reverse), default=-1)


def _is_reversed(terminal: Terminal, line: str) -> bool:
    return terminal.screen.display.index(line) == _selected(terminal)


def test_a_resize_redraws_the_screen(terminal: Terminal) -> None:
    """In small terminals the table keeps some rows."""
    terminal.press("3", lambda text: "client-00" in text)
    for columns, lines in ((60, 15), (30, 8), (120, 40), (80, 24)):
        terminal.resize(columns, lines)
        shown = min(SESSIONS, lines - 12)
        terminal.wait(lambda text, shown=shown: text.count("client-") >= max(1, shown) and " of 30" in text)
        assert max(map(len, terminal.text.splitlines())) <= columns


@pytest.mark.parametrize("end", ["q", "\x03", "SIGTERM"])
def test_the_terminal_is_restored(terminal: Terminal, end: str) -> None:
    """After `q`, Ctrl-C and SIGTERM, with exit code 0."""
    if end == "SIGTERM":
        terminal.process.send_signal(signal.SIGTERM)
    else:
        terminal.press(end, lambda _: True)
    assert terminal.wait_end() == 0
    assert terminal.is_restored()
    assert b"Traceback" not in terminal.raw


def test_ctrl_z_restores_the_terminal(shared: ServerProcess) -> None:
    """The user gets a usable shell. If the job continues, the screen is drawn again."""
    with Terminal("top", "--endpoint", shared.endpoint, shell=SHELL) as terminal:
        terminal.wait(lambda text: "tier▲" in text)
        for _ in range(2):
            terminal.press("\x1a", lambda _: b"the job is suspended" in terminal.raw)
            assert terminal.is_restored()
            terminal.raw = b""
            terminal.press("\n", lambda _: b"\x1b[?1049h" in terminal.raw and b"lmdb" in terminal.raw)
            terminal.press("2", lambda text: "a-tenant-with" in text)
        terminal.press("q", lambda _: True)
        assert terminal.wait_end() == 0
        assert terminal.is_restored()


def test_a_count_ends_the_screen(shared: ServerProcess) -> None:
    with Terminal("top", "--endpoint", shared.endpoint, "--count", "2") as terminal:
        assert terminal.wait_end() == 0
        assert terminal.is_restored()


@pytest.mark.slow
def test_a_server_goes_away_and_comes_back(tmp_path: Path) -> None:
    """The screen keeps the last figures, and shows those of the new server."""
    with ServerProcess(tmp_path).start() as server, Terminal("top", "--endpoint", server.endpoint) as terminal:
        terminal.wait(lambda text: "lmdb" in text)
        server.kill()
        terminal.wait(lambda text: "no server answers" in text and "the figures are from" in text and "lmdb" in text)
        terminal.press("2", lambda text: "(the rest)" in text)
        server.start()
        terminal.wait(lambda text: "no server answers" not in text and "(the rest)" in text)
        server.suspend()
        terminal.press("1", lambda text: "tier▲" in text)
        terminal.press("q", lambda _: True)
        try:
            assert terminal.wait_end() == 0, "a server that hangs does not delay the end"
        finally:
            server.resume()


@pytest.mark.parametrize("color", [True, False])
def test_trouble_has_a_colour_unless_no_color_is_set(tmp_path: Path, *, color: bool) -> None:
    """A server that does not answer is shown in red; a word says it, too."""
    environment = {} if color else {"NO_COLOR": "1"}
    with Terminal("top", "--endpoint", f"unix:{tmp_path}/none", **environment) as terminal:
        terminal.wait(lambda text: "! no server answers" in text)
        line = next(number for number, text in enumerate(terminal.screen.display) if text.startswith("! "))
        assert terminal.screen.buffer[line][0].fg == ("red" if color else "default")


def sample(server: ServerProcess) -> dict[str, Any]:
    values = _status(server)
    return rates(values, values, 1.0)


@pytest.fixture
def screen(shared: ServerProcess) -> TopScreen:
    """Returns a screen with hostile, wide and long names, and with a broken tier."""
    screen = TopScreen(Console(), "unix:/run/kvtier/kvtier.sock")
    screen.sample = copy.deepcopy(sample(shared))
    screen.sample["tiers"][1] |= {"healthy": False, "trouble": "no space left\x1b[2J" * 9}
    for session, name in zip(screen.sample["sessions"], ("模型" * 30, "\x1b[2J\u202e" * 9, "x" * 200), strict=False):
        session |= {"client_name": name, "engine_id": name, "model": name, "tenant": name}
    return screen


@pytest.mark.parametrize("columns", [1, 10, 20, 60, 80, 200])
@pytest.mark.parametrize("lines", [1, 3, 6, 15, 24, 60])
def test_every_size_is_filled_exactly(screen: TopScreen, columns: int, lines: int) -> None:
    """No line is longer than the terminal; names cannot control it."""
    for key in ("1", "2", "3", "4", ENTER, "end", "up", "home", "right"):
        screen.press({ENTER: "enter"}.get(key, key))
        text = screen.render(columns, lines).plain
        shown = text.split("\n")
        assert len(shown) == lines
        assert not [character for character in text if character != "\n" and unicodedata.category(character)[0] == "C"]
        if columns >= 60:
            assert max(map(cell_len, shown)) <= columns


def test_trouble_is_shown_first(screen: TopScreen) -> None:
    """A broken tier is named above all figures, in red, and its details have the whole text."""
    text = screen.render(80, 24)
    lines = text.plain.split("\n")
    assert lines[1].startswith("! lmdb: no space left")
    assert any(span.style == "red" for span in text.spans)
    screen.press("end")
    screen.press("enter")
    details = "".join(line[11:].strip() for line in screen.render(80, 24).plain.split("\n"))
    assert (r"no space left\x1b[2J" * 9).replace(" ", "") in details.replace(" ", "")


def test_rows_of_the_same_name_are_all_reachable(screen: TopScreen) -> None:
    """Two sessions can have the same names."""
    screen.sample["sessions"] = [dict(screen.sample["sessions"][5], calls_per_s=number) for number in range(40)]
    screen.press("3")
    seen = set()
    for _ in range(40):
        text = screen.render(80, 24)
        seen.add(next(line for line, span in _reversed_rows(text.plain, text.spans)))
        screen.press("down")
        screen.sample = dict(screen.sample)
    assert len(seen) == 40


def _reversed_rows(plain: str, spans: Any) -> Iterator[tuple[str, Any]]:
    """Yields the lines of rows in reverse video."""
    for span in spans:
        if span.style == "reverse" and "client" in plain[span.start : span.end]:
            yield plain[span.start : span.end], span


def test_a_selected_row_stays_selected(screen: TopScreen) -> None:
    """If the order changes, the selection moves with its row."""
    screen.press("3")
    for _ in range(5):
        screen.press("down")
    text = screen.render(80, 24)
    [before] = [line for line, _ in _reversed_rows(text.plain, text.spans)]
    for number, session in enumerate(screen.sample["sessions"]):
        session["calls_per_s"] = float(number)
    text = screen.render(80, 24)
    [after] = [line for line, _ in _reversed_rows(text.plain, text.spans)]
    assert after.split()[0] == before.split()[0]
