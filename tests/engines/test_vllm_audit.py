"""Audits in a real engine: stored KV that is wrong although its bytes are whole is found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from scenario import BLOCK, RunEngine, assert_same, generate, tokens
from server_process import ServerProcess
from tiny_models import make_dense
from wrong_kv import FAULTS, VARIABLE

PROMPTS = [tokens(91, 8 * BLOCK + 5), tokens(92, 6 * BLOCK + 1), tokens(93, 5 * BLOCK + 9)]
BAD = {fault: tokens(200 + number, 7 * BLOCK + 3) for number, fault in enumerate(FAULTS)}
STALE = tokens(300, 7 * BLOCK + 3)
FORGET = {"op": "reset"}
LOOKUP = {"op": "lookup"}
REMOVED = "block differs from the KV that an engine computes"


def _counts(result: dict[str, Any]) -> dict[str, int]:
    """The audits until the end of a step, by their outcome. Some end with the next step."""
    prefix = "vllm:kvtier_audits:"
    found = {
        name.removeprefix(prefix): int(value) for name, value in result["kvtier"].items() if name.startswith(prefix)
    }
    assert set(found) == {"equal", "close", "different", "unknown", "gone"}
    return found


def _set(fault: Path, text: str) -> dict[str, Any]:
    script = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    return {"op": "shell", "command": [sys.executable, "-c", script, str(fault), text]}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def audited(
    request: pytest.FixtureRequest,
    run_engine: RunEngine,
    server: ServerProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """An engine that audits each hit: intact KV, KV that it stored wrongly, KV of other weights."""
    folder = tmp_path_factory.mktemp("audit")
    make_dense(folder / "trained", seed=4321)
    fault = folder / "fault"
    fault.write_text("")
    server.start()
    logged = (server.folder / "server.log").read_text().count(REMOVED)
    bad = [
        [
            _set(fault, name),
            generate(f"store: {name}", [prompt]),
            FORGET,
            _set(fault, ""),
            generate(name, [prompt]),
            FORGET,
        ]
        for name, prompt in BAD.items()
    ]
    end = generate("end", [tokens(400, BLOCK)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(fault))
        results = run_engine(
            [
                generate("first", PROMPTS),
                FORGET,
                generate("alone", PROMPTS),
                FORGET,
                generate("at once", PROMPTS, at_once=True),
                FORGET,
                generate("intact", [tokens(401, BLOCK)]),
                *(step for steps in bad for step in steps),
                generate("wrong", [tokens(402, BLOCK)]),
                generate("old", [STALE]),
                FORGET,
                {"op": "weights", "path": str(folder / "trained")},
                LOOKUP,
                generate("new", [STALE]),
                FORGET,
                end,
            ],
            endpoint=server.endpoint,
            extra={"audit_fraction": 1.0, "weights_change_on_reset": False},
            prepare=["wrong_kv"],
            dtype=request.param,
        )
    server.kill()
    log = (server.folder / "server.log").read_text()
    return results | {"logged": log.count(REMOVED) - logged}


def test_intact_kv_is_accepted(audited: dict[str, Any]) -> None:
    """Also if the engine computes it in batches of other sizes. The answers stay the same."""
    counts = _counts(audited["intact"])
    assert counts["equal"] + counts["close"] == 2 * len(PROMPTS)
    assert counts["different"] == counts["unknown"] == counts["gone"] == 0
    assert audited["alone"]["external_hits"] == sum((len(prompt) - 1) // BLOCK * BLOCK - BLOCK for prompt in PROMPTS)
    assert_same(audited["first"], audited["alone"])


def test_wrong_kv_is_found(audited: dict[str, Any]) -> None:
    """The engine names the block and the layer, and the server removes the block."""
    intact, wrong = _counts(audited["intact"]), _counts(audited["wrong"])
    assert wrong["different"] - intact["different"] == len(FAULTS)
    assert wrong["equal"] + wrong["close"] == intact["equal"] + intact["close"]
    assert "is not the KV that this engine computes: layer model.layers." in audited["log"]


def test_kv_of_other_weights_is_found(audited: dict[str, Any]) -> None:
    """The setting says that a reset does not change the weights, but it did."""
    assert audited["new"]["external_hits"] == 6 * BLOCK, "a lower tier has the old KV"
    assert _counts(audited["end"])["different"] - _counts(audited["wrong"])["different"] == 1
    assert audited["logged"] == len(FAULTS) + 1, "the server names the engine that stored the block"
