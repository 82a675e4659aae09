"""The choice of an engine."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from disagg_proxy.fleet import Instance, Role
from kv_aware_router.block_index import BlockIndex
from kv_aware_router.program import parse_arguments, parse_target
from kv_aware_router.routing import SLACK, Engine, Policy, Router, prompt_of, tokenize_body

PROMPT = list(range(40))


def engines(*known: int) -> list[Engine]:
    """Engines whose hosts have these numbers of leading blocks of the prompt, 10 tokens each."""
    made = []
    for number, blocks in enumerate(known):
        index = BlockIndex()
        event = {"type": "BlockStored", "parent_block_hash": None, "block_size": 10, "medium": "CPU"}
        index.apply("t", [event | {"block_hashes": list(range(blocks)), "token_ids": PROMPT[: 10 * blocks]}])
        made.append(Engine(Instance(f"http://e{number}", Role.DECODE), index))
    return made


def chosen(router: Router, *tried: Engine, now: float = 0.0) -> tuple[int, int]:
    route = router.choose(PROMPT, "m", now, tried)
    assert route is not None
    route.engine.takes(len(PROMPT), route.known_tokens)
    return router.engines.index(route.engine), route.known_tokens


def test_the_engine_with_the_longest_prefix_gets_the_request() -> None:
    router = Router(engines(1, 3, 2), Policy.PREFIX)
    assert [chosen(router) for _ in range(3)] == [(1, 30)] * 3
    assert chosen(router, router.engines[1]) == (2, 20), "the first one failed"
    assert router.choose(PROMPT, "m", 0.0, router.engines) is None


def test_without_known_blocks_the_least_loaded_engine_gets_the_request() -> None:
    router = Router(engines(0, 0, 0), Policy.PREFIX)
    assert [chosen(router)[0] for _ in range(4)] == [0, 1, 2, 0]
    router.engines[1].instance.outstanding = 1
    assert [chosen(router)[0] for _ in range(2)] == [2, 0]


def test_an_engine_with_too_many_requests_gets_none_for_its_blocks() -> None:
    router = Router(engines(4, 0), Policy.PREFIX)
    router.engines[0].instance.outstanding = SLACK - 1
    assert chosen(router) == (0, 40)
    router.engines[0].instance.outstanding = SLACK
    assert chosen(router) == (1, 0)


def test_round_robin_ignores_blocks() -> None:
    router = Router(engines(4, 0), Policy.ROUND_ROBIN)
    assert [chosen(router) for _ in range(4)] == [(0, 40), (1, 0), (0, 40), (1, 0)]


def test_an_engine_that_failed_rests() -> None:
    """It is used again after its pause, or if no other engine is left."""
    router = Router(engines(4, 0), Policy.PREFIX)
    router.engines[0].instance.failed(10.0)
    assert chosen(router, now=10.5) == (1, 0)
    assert chosen(router, router.engines[1], now=10.5) == (0, 40)
    assert chosen(router, now=11.0) == (0, 40)


@pytest.mark.parametrize(
    ("body", "tokens", "asked"),
    [
        ({"prompt": [1, 2]}, [1, 2], None),
        ({"prompt": "a", "model": "m", "n": 2}, None, {"prompt": "a", "model": "m"}),
        ({"messages": [], "tools": []}, None, {"messages": [], "tools": []}),
        ({"prompt": ["a", "b"]}, None, None),
        ({"prompt": [[1], [2]]}, None, None),
        ({}, None, None),
    ],
)
def test_the_prompt_of_a_request(body: dict[str, Any], tokens: Any, asked: Any) -> None:
    """Token ids are used as they are; for texts an engine is asked."""
    assert prompt_of(body) == tokens
    if tokens is None:
        assert tokenize_body(body) == asked


def test_the_command_line() -> None:
    assert parse_target("http://a:1/v1,events=ipc:///x,replay=ipc:///y") == ("http://a:1", ("ipc:///x", "ipc:///y"))
    assert parse_target("http://a:1,events=tcp://h:5557")[1] == ("tcp://h:5557", None)
    for wrong in ("a:1,events=x", "http://a:1", "http://a:1,replay=x", "http://a:1,events=x,port=3"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_target(wrong)
    options = parse_arguments(["--engine", "http://a,events=e", "--engine", "http://b,events=e"])
    assert (len(options.engine), options.policy) == (2, "prefix")
