"""Server failures at any moment: the engine computes, and later finds what is cached again."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scenario import BLOCK, RunEngine, assert_same, generate, tokens
from server_process import ServerProcess

Lives = Callable[[str], dict[str, Any]]

PROMPTS = [tokens(71, 12 * BLOCK + 3), tokens(72, 8 * BLOCK + 1)]
BUDGET_SECONDS = 2.5
"""Seconds; less than the time to notice a silent server, which would end a lookup too."""

LIFE_SECONDS = 800
HUNG_SECONDS = 110.0
"""Tells an engine that hangs from one that does not: some budgets and deadlines of a few seconds
are less."""
MOMENTS = ("asking", "loading", "saving", "decoding")
SERVER_ACTIONS = ("kill", "hang", "restart-twice")
CASES = [(deed, moment) for deed in SERVER_ACTIONS for moment in MOMENTS]
LIVES = {"eager": CASES, "lazy": [case for case in CASES if case[1] in {"loading", "saving"}]}
EACH = pytest.mark.parametrize(
    ("mode", "deed", "moment"), [(mode, *case) for mode, cases in LIVES.items() for case in cases]
)
BOTH = pytest.mark.parametrize("mode", LIVES)
NEW = {case: tokens(100 + number, 7 * BLOCK + 5) for number, case in enumerate(CASES)}
"""A new prompt per case, whose blocks are to be saved."""
POOL_BLOCKS = 24
"""Lazy mode saves what is about to be evicted, so there must be pressure: the prompts of one case
need 30 blocks."""


def server_command(server: ServerProcess, action: str) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("server_process.py")), str(server.folder), action]


def meet(server: ServerProcess) -> list[dict[str, Any]]:
    """Returns the steps after which the connector is connected."""
    return [{"op": "meet", "command": server_command(server, "status")}]


def case_steps(server: ServerProcess, case: tuple[str, str], *, lazy: bool) -> list[dict[str, Any]]:
    """Returns the steps of one case: a failure, a restart, a reconnect, and normal operation.

    In lazy mode nothing is forgotten that is yet to be stored: there each prompt evicts the others'
    blocks.
    """
    deed, moment = case
    forget = [] if lazy else [{"op": "reset"}]
    restart_stopped = {"kill": "start", "hang": "resume"}.get(deed)
    act = {"when": moment, "command": server_command(server, deed)}
    prompts = [NEW[case], *PROMPTS]
    return [
        *forget,
        {"op": "generate", "name": f"{deed} {moment}", "prompts": prompts, "act": act, "at_once": not lazy},
        *([{"op": "server", "command": server_command(server, restart_stopped)}] if restart_stopped else []),
        {
            "op": "find",
            "name": f"{deed} {moment}, then",
            "status": server_command(server, "status"),
            "prompts": prompts,
            "at_once": False,
            "forget": not lazy,
        },
        {"op": "settle", "name": f"{deed} {moment}, left", "command": server_command(server, "status")},
    ]


@pytest.fixture(scope="module")
def reference(run_engine: RunEngine) -> dict[str, Any]:
    """Answers of an engine without a connector, by prompt."""
    prompts = [*PROMPTS, *NEW.values()]
    rows = run_engine([generate("all", prompts)])["all"]["rows"]
    return {str(prompt): row for prompt, row in zip(prompts, rows, strict=True)}


@pytest.fixture(scope="module")
def lives(run_engine: RunEngine, tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """One engine per mode that starts without a server and meets every failure at every moment."""
    begun: set[str] = set()

    @functools.cache
    def live(mode: str) -> dict[str, Any]:
        assert mode not in begun, "this life came to a bad end before"
        begun.add(mode)
        server = ServerProcess(tmp_path_factory.mktemp("server"))
        lazy = mode == "lazy"
        steps = [
            {"op": "generate", "name": "absent", "prompts": PROMPTS},
            {"op": "server", "command": server_command(server, "start")},
            *meet(server),
            {"op": "generate", "name": "come", "prompts": PROMPTS},
            *(step for case in LIVES[mode] for step in case_steps(server, case, lazy=lazy)),
        ]
        try:
            return run_engine(
                steps,
                endpoint=server.endpoint,
                lookup_timeout_s=BUDGET_SECONDS,
                extra={"lazy_offload": lazy},
                runner="live_run.py",
                long_timeout=False,
                seconds=LIFE_SECONDS,
                max_model_len=16 * BLOCK,
                max_num_batched_tokens=4 * BLOCK,
                **({"num_gpu_blocks_override": POOL_BLOCKS} if lazy else {}),
            )
        finally:
            server.kill()

    return live


def same(reference: dict[str, Any], prompts: list[list[int]], result: dict[str, Any]) -> None:
    """Asserts that the answers to these prompts are right."""
    assert_same({"rows": [reference[str(prompt)] for prompt in prompts]}, result)


@EACH
def test_an_engine_goes_on(reference: dict[str, Any], lives: Lives, mode: str, deed: str, moment: str) -> None:
    """A server that dies, hangs or restarts is a miss: right tokens in bounded time, no error."""
    result = lives(mode)[f"{deed} {moment}"]
    assert result["acted"], "it did not happen"
    same(reference, [NEW[deed, moment], *PROMPTS], result)
    assert result["seconds"] < HUNG_SECONDS
    assert result["abandoned"] <= len(result["rows"]), "no request waits for a second lookup"


@EACH
def test_the_cache_is_used_again(reference: dict[str, Any], lives: Lives, mode: str, deed: str, moment: str) -> None:
    """B4.4 Stored blocks are found in any tier; nothing stays pinned, half stored or held."""
    result, left = lives(mode)[f"{deed} {moment}, then"], lives(mode)[f"{deed} {moment}, left"]
    same(reference, [NEW[deed, moment], *PROMPTS], result)
    assert result["external_hits"] > 0
    assert left["server"] == {"leases": 0, "stores": 0, "quarantined_bytes": 0}
    assert not any(left["engine"].values()), left["engine"]


@BOTH
def test_a_server_may_come_later(reference: dict[str, Any], lives: Lives, mode: str) -> None:
    """Without a server at start, requests miss; a later server is used."""
    for moment in ("absent", "come"):
        same(reference, PROMPTS, lives(mode)[moment])
    assert lives(mode)["absent"]["external_hits"] == 0


@BOTH
def test_a_load_from_a_server_that_died_fails(lives: Lives, mode: str) -> None:
    """B4.3 Lookups of the first life are not read from the second: the engine computes."""
    for deed in ("kill", "restart-twice"):
        assert lives(mode)[f"{deed} loading"]["failed_loads"] > 0, deed


@BOTH
def test_saves_that_hang_or_die_are_reported(lives: Lives, mode: str) -> None:
    """B4.5, B5.6 They are reported as not stored, within their deadline."""
    for deed in ("kill", "hang"):
        assert lives(mode)[f"{deed} saving"]["not_stored"] > 0, deed


def test_a_hang_is_waited_out_once(lives: Lives) -> None:
    """One timeout for the lookups in flight, and no lookups until the server answers."""
    assert lives("eager")["hang asking"]["abandoned"] > 0
    for moment in ("loading", "decoding"):
        assert lives("eager")[f"hang {moment}"]["abandoned"] == 0, moment


@BOTH
def test_the_log_says_what_happened(lives: Lives, mode: str) -> None:
    """Warnings are rate-limited, and no hook of the connector failed."""
    assert 1 <= lives(mode)["log"].count("no kvtier server is connected") <= 1 + LIFE_SECONDS // 30
    assert not [line for line in lives(mode)["log"].splitlines() if "background.py" in line and "Traceback" in line]
    assert not re.findall(r"kvtier: \w+ failed: .*", lives(mode)["log"])
