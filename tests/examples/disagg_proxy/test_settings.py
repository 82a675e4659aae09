"""The command line."""

from __future__ import annotations

import pytest
from disagg_proxy.settings import Engine, Settings, parse_arguments
from disagg_proxy.transfer import Address


def test_engines_are_named_one_by_one() -> None:
    """Several of each role; a kvtier server's address follows its decode engine."""
    settings = parse_arguments(
        [
            "--prefill=http://p1:8100/",
            "--prefill=http://p2:8100/v1,hints=unix:/run/kvtier.sock",
            "--decode=http://d1:8200,kvtier=10.0.0.3:7070,hints=10.0.0.3:7450",
            "--decode=https://d2",
            "--port=0",
        ]
    )
    assert settings.prefill == (Engine("http://p1:8100"), Engine("http://p2:8100", hints="unix:/run/kvtier.sock"))
    assert settings.decode == (
        Engine("http://d1:8200", Address("10.0.0.3", 7070), "10.0.0.3:7450"),
        Engine("https://d2"),
    )
    assert settings.hint_servers() == ["10.0.0.3:7450", "unix:/run/kvtier.sock"]
    assert [instance.kvtier for instance in settings.decode_instances()] == [Address("10.0.0.3", 7070), None]
    assert settings.port == 0


def test_defaults() -> None:
    """B2.21 450 s for an entry; only this host is served by default."""
    settings = parse_arguments(["--decode=http://d:1"])
    assert settings == Settings(decode=(Engine("http://d:1"),))
    assert (settings.entry_ttl, settings.host) == (450.0, "127.0.0.1")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--prefill=http://p:1"],
        ["--decode=d:8200"],
        ["--decode=http://"],
        ["--decode=http://d:1?x=1"],
        ["--decode=http://d:1,kvtier=nowhere"],
        ["--decode=http://d:1,kvteir=h:1"],
        ["--prefill=http://p:1,kvtier=h:1", "--decode=http://d:1"],
        ["--decode=http://d:1,hints=nowhere"],
        ["--decode=http://d:1", "--tool-time=0"],
        ["--decode=http://d:1", "--entry-ttl=0"],
        ["--decode=http://d:1", "--entry-ttl=nan"],
        ["--decode=http://d:1", "--prefill-timeout=inf"],
        ["--decode=http://d:1", "--max-entries=-1"],
        ["--decode=http://d:x"],
    ],
)
def test_typos_end_the_program(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """At start, with a line that names it."""
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err
