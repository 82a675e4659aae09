"""Two simulated hosts: an engine loads blocks from the server of the other host.

The first engine stores its blocks at its own server and ends. Requests to the second engine name
that server as their source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness.bulk import wait_for_bulk
from harness.payloads import namespace_of
from harness.ports import ReservedPort
from scenario import RunEngine, assert_same, generate, hit_limit, server_step, tokens
from server_process import ServerProcess

from kvtier.client import Client

PROMPTS = [tokens(71, 333), tokens(72, 70)]
OTHERS = [tokens(73, 200)]
ANSWER = {"max_tokens": 8}


@pytest.fixture(scope="module")
def runs(run_engine: RunEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Results of both engines."""
    folders = [tmp_path_factory.mktemp("host") for _ in range(2)]
    with ReservedPort() as port:
        address = f"127.0.0.1:{port.number}"
        config = folders[0] / "kvtier.toml"
        config.write_text(f'insecure = true\n[peers]\nservers = ["{address}"]\ndeadline = "5s"\n')
        here = ServerProcess(folders[0], region="64MiB", flags=["--config", str(config)], long_timeout=True)
        there = ServerProcess(folders[1], region="64MiB", flags=["--insecure", "--listen", address], long_timeout=True)
        source, unlisted = {"source": address}, {"source": f"127.0.0.2:{port.number}"}
        try:
            for server in (here, there):
                server.start()
            with Client(address, namespace=namespace_of(4096), transport="tcp") as client:
                client.wait_until_connected(60)
                wait_for_bulk(client)  # otherwise the first search would wait for its start
            alone = run_engine(
                [generate("prompts", PROMPTS, **ANSWER), generate("others", OTHERS, **ANSWER)],
                endpoint=there.endpoint,
            )
            second = run_engine(
                [
                    generate("not named", PROMPTS, settings={"skip_save": True}, **ANSWER),
                    {"op": "reset"},
                    generate("unlisted", OTHERS, settings=unlisted, **ANSWER),
                    generate("from there", PROMPTS, settings=source, **ANSWER),
                    {"op": "reset"},
                    server_step(there, "kill"),
                    generate("from here", PROMPTS, settings=source, **ANSWER),
                ],
                endpoint=here.endpoint,
            )
            yield {"alone": alone, **second}
        finally:
            for server in (here, there):
                server.kill()


@pytest.mark.parametrize(
    ("step", "reference", "hits"),
    [
        ("not named", "prompts", 0),
        ("unlisted", "others", 0),
        ("from there", "prompts", hit_limit(PROMPTS)),
        ("from here", "prompts", hit_limit(PROMPTS)),
    ],
)
def test_answers_are_the_same_with_blocks_of_another_host(
    runs: dict[str, Any], step: str, reference: str, hits: int
) -> None:
    """All full blocks come from the named server once; then the engine's own server has them."""
    assert_same(runs["alone"][reference], runs[step])
    assert runs[step]["external_hits"] == hits
