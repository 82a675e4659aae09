"""Weights that are changed in place, as in reinforcement learning: no old KV is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, server_step, tokens, wait_until_durable
from server_process import ServerProcess
from tiny_models import make_dense

PROMPTS = [tokens(71, 8 * BLOCK), tokens(72, 5 * BLOCK + 3)]
FORGET = {"op": "reset"}
"""Empties the engine's own prefix cache only."""
LOOKUP = {"op": "lookup"}
"""Waits until the engine has connected again, and looks requests up."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    path = tmp_path_factory.mktemp("trained") / "dense"
    make_dense(path, seed=4321)
    return path


@pytest.fixture(scope="module")
def before(run_engine: RunEngine) -> dict[str, Any]:
    """Answers of the old weights, from an engine without a connector."""
    result: dict[str, Any] = run_engine([generate("before", PROMPTS)])["before"]
    return result


@pytest.fixture(scope="module")
def after(run_engine: RunEngine, trained: Path) -> dict[str, Any]:
    """Answers of a fresh engine with the new weights, without a connector."""
    result: dict[str, Any] = run_engine([generate("after", PROMPTS)], model=str(trained))["after"]
    return result


@pytest.fixture(scope="module")
def updated(run_engine: RunEngine, server: ServerProcess, trained: Path) -> dict[str, Any]:
    """An engine whose weights are changed twice, the second time with a name for the new ones."""
    server.start()
    restart = [server_step(server, "await-durable"), server_step(server, "kill"), server_step(server, "start")]
    return run_engine(
        [
            generate("old", PROMPTS),
            *restart,
            LOOKUP,
            FORGET,
            generate("old again", PROMPTS),
            {"op": "weights", "path": str(trained)},
            LOOKUP,
            generate("new", PROMPTS),
            FORGET,
            generate("new again", PROMPTS),
            *restart,
            LOOKUP,
            FORGET,
            generate("new after a restart", PROMPTS),
            {"op": "weights", "path": str(trained), "version": "step 7"},
            LOOKUP,
            generate("named", PROMPTS),
        ],
        endpoint=server.endpoint,
    )


def test_after_an_update_nothing_of_the_old_weights_is_served(
    updated: dict[str, Any], before: dict[str, Any], after: dict[str, Any]
) -> None:
    """B4.17 The engine answers like a fresh one with the new weights; LMDB has old blocks."""
    assert_same(before, updated["old"])
    assert_same(before, updated["old again"])
    assert updated["old again"]["external_hits"] == hit_limit(PROMPTS), "LMDB serves the old weights' blocks"
    assert updated["new"]["external_hits"] == 0
    assert_same(after, updated["new"])


def test_new_blocks_are_served_also_after_a_restart_of_the_server(
    updated: dict[str, Any], after: dict[str, Any]
) -> None:
    """The engine keeps its version of the weights, and LMDB the blocks of this version."""
    for name in ("new again", "new after a restart"):
        assert updated[name]["external_hits"] == hit_limit(PROMPTS)
        assert_same(after, updated[name])


def test_other_engines_find_the_blocks_of_the_weights_that_they_have(
    run_engine: RunEngine,
    server: ServerProcess,
    updated: dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
    trained: Path,
) -> None:
    """One with the files' weights finds the old blocks; new weights are shared by setting only."""
    assert updated["named"]["external_hits"] == 0
    assert_same(after, updated["named"])
    wait_until_durable(server)
    server.kill()
    server.start()
    steps = [generate("old", PROMPTS), {"op": "weights", "path": str(trained), "version": "step 7"}]
    steps += [LOOKUP, generate("new", PROMPTS)]
    other = run_engine(steps, endpoint=server.endpoint)
    assert_same(before, other["old"])
    assert other["old"]["external_hits"] == hit_limit(PROMPTS)
    assert_same(after, other["new"])
    assert other["new"]["external_hits"] == 0, "a name is not a version"
    extra = {"weights_version": "step 7"}
    for hits in (0, hit_limit(PROMPTS)):
        started = run_engine([generate("new", PROMPTS)], endpoint=server.endpoint, model=str(trained), extra=extra)
        assert started["new"]["external_hits"] == hits
        assert_same(after, started["new"])
