"""Per-request settings in `kv_transfer_params`."""

from __future__ import annotations

from typing import Any

import pytest
from connector_fakes import UNKNOWN_ADAPTER, FakeClient, make_request, make_step, scheduler_side
from harness.polling import wait_until

from kvtier.client import Medium, TierFilter, make_key
from kvtier.client.engines.vllm.request_settings import RequestSettings
from kvtier.client.engines.vllm.scheduler.requests import plain_params

KEYS = [make_key(bytes([number]) * 32, 0) for number in range(6)]
TABLE = [[1, 2, 3, 4, 5, 6]]


def _run(client: FakeClient, settings: Any, **fields: Any) -> tuple[int, list[bytes]]:
    """Runs a request of four blocks up to its first step; returns hit tokens and offered keys."""
    with scheduler_side(client) as (scheduler, _):
        request = make_request(4, kv_transfer_params={"kvtier": settings, "peer": 1}, **fields)
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0)[0] is not None)
        hit, _ = scheduler.matched_tokens(request, 0)
        scheduler.blocks_allocated(request, TABLE, hit or 0)
        if hit:
            scheduler.build_step(make_step({}))
            scheduler.loads_reported({"r"}, ())
        wait_until(lambda: not scheduler._requests["r"].registration.voting)
        request.num_computed_tokens = hit
        saves = scheduler.build_step(make_step({"r": TABLE}, r=16 - (hit or 0))).saves
        return hit or 0, [key for save in saves for key in save.keys]


def test_what_is_asked_for_is_passed_on() -> None:
    """Retention and priority go with the registration; the rest with its lookups."""
    client = FakeClient(set(KEYS[:2]))
    asked = {
        "retain_for_s": 60,
        "conversation_id": "c",
        "exclude": ["lmdb"],
        "exclude_media": ["network"],
        "exclude_remote": True,
        "source": "Host-B.example:7450",
        "min_hit_tokens": 5,
        "offload_policy": "request_level",
    }
    assert _run(client, asked, priority=-3)[0] == 8
    tiers = TierFilter(("lmdb",), (Medium.NETWORK,), remote=True)
    source = "host-b.example:7450"
    assert client.options == [
        {
            "exclude": tiers,
            "source": source,
            "min_hits": 2,
            "retain_for": 60.0,
            "conversation_id": "c",
            "priority": 3,
        }
    ]
    assert client.begun == {"r": (17, {"peer": 1, "offload_policy": "request_level"})}


def test_a_request_that_asks_for_nothing_says_nothing() -> None:
    """An ordinary request's calls are unchanged."""
    client = FakeClient(set(KEYS[:2]))
    assert _run(client, {}) == (8, KEYS[2:4])
    assert client.options == [{}]
    assert client.begun == {"r": (17, {"peer": 1})}


@pytest.mark.parametrize(
    ("setting", "option"),
    [
        ({"retain_for_s": 60}, {"retain_for": 60.0}),
        ({"retain_for_s": 0}, {"retain_for": 0.0}),
        ({"conversation_id": "c"}, {"conversation_id": "c"}),
        ({"exclude": ["lmdb"]}, {"exclude": TierFilter(("lmdb",))}),
        ({"exclude_media": ["disk"]}, {"exclude": TierFilter(media=(Medium.DISK,))}),
        ({"exclude_remote": True}, {"exclude": TierFilter(remote=True)}),
        ({"exclude_remote": False}, {}),
        ({"source": "host-b:7450"}, {"source": "host-b:7450"}),
        ({"min_hit_tokens": 5}, {"min_hits": 2}),
    ],
    ids=str,
)
def test_each_setting_alone_is_passed_on(setting: dict[str, Any], option: dict[str, Any]) -> None:
    """A setting has an effect without the others."""
    client = FakeClient(set(KEYS[:2]))
    assert _run(client, setting) == (8, KEYS[2:4])
    assert client.options == [option]


@pytest.mark.parametrize(("least", "hit"), [(8, 8), (9, 0), (400, 0)])
def test_a_hit_that_is_too_short_is_not_loaded(least: int, hit: int) -> None:
    """A short hit is released; its blocks are computed, and stored if missing."""
    client = FakeClient(set(KEYS[:2]))
    assert _run(client, {"min_hit_tokens": least})[0] == hit
    assert client.released == [1], "its pin is given back either way"


def test_loading_and_saving_can_be_left_out() -> None:
    """The two settings are independent; a request that stores is registered."""
    client = FakeClient(set(KEYS[:2]))
    assert _run(client, {"skip_load": True}) == (0, KEYS[:4])
    assert (client.asked, list(client.begun)) == ([0], ["r"])
    client = FakeClient(set(KEYS[:2]))
    assert _run(client, {"skip_save": True}) == (8, [])
    client = FakeClient(set(KEYS[:2]))
    assert _run(client, {"skip_save": True, "skip_load": True}) == (0, [])
    assert not client.begun


HELD, OVERLAP = {"do_remote_decode": True}, {"do_remote_decode": True, "remote_overlap": True}
BACK = {"do_remote_prefill": True}


@pytest.mark.parametrize(
    ("roles", "params", "own", "fields", "expected"),
    [
        ("LS", {}, {}, {}, "load save pull"),
        ("S", {}, {}, {}, "save pull"),
        ("L", {}, {}, {}, "load pull"),
        ("LS", {}, {"skip_load": True}, {}, "save"),
        ("LS", {}, {"skip_save": True}, {}, "load pull"),
        ("LS", {}, {}, {"skip_reading_prefix_cache": True}, "save"),
        ("LS", HELD, {}, {}, "load save pull hold"),
        ("L", HELD, {}, {}, "load save pull hold"),
        ("S", HELD, {"skip_load": True}, {}, "save hold"),
        ("LS", HELD, {"skip_save": True}, {}, "load pull"),
        ("LS", HELD, {"hold": False}, {}, "load save pull"),
        ("LS", OVERLAP, {}, {}, "load save pull hold early"),
        ("LS", BACK, {}, {}, "load save pull"),
        ("LS2", BACK, {}, {}, "load save pull hold"),
        ("L2", BACK, {}, {}, "load save pull hold"),
        ("LS2", OVERLAP, {}, {"lora_request": UNKNOWN_ADAPTER}, ""),
    ],
)
def test_what_a_request_may_do(
    roles: str, params: dict[str, Any], own: dict[str, Any], fields: dict[str, Any], expected: str
) -> None:
    """Roles of the engine concern its cache. A hand-off stores and pulls in each role.

    `roles`: L loads, S saves, 2 hands over in both directions.
    """
    options = {"may_load": "L" in roles, "may_save": "S" in roles, "bidirectional_kv_xfer": "2" in roles}
    with scheduler_side(FakeClient(), **options) as (scheduler, _):
        scheduler.new_request(
            make_request(2, kv_transfer_params={**params, "kvtier": own}, num_prompt_tokens=8, **fields)
        )
        found = scheduler._requests["r"]
    assert found.request_level is found.holds_early, "lazy mode stores the blocks too late for a peer"
    flags = {name: getattr(found, f"may_{name}") for name in ("load", "save", "pull", "hold")}
    assert [name for name, value in (flags | {"early": found.holds_early}).items() if value] == expected.split()


@pytest.mark.parametrize(
    ("given", "policy"),
    [("block_level", "block_level"), ("chunk_level", "block_level"), ("request_level", "request_level")],
)
def test_policies_have_the_names_of_the_service(given: str, policy: str) -> None:
    """B3.1 Newer releases of vLLM say chunk_level for block_level: the adapter maps it."""
    client = FakeClient()
    _run(client, {"offload_policy": given})
    assert client.begun["r"][1]["offload_policy"] == policy


@pytest.mark.parametrize(
    "wrong",
    [
        {"retain_for_s": "long"},
        {"retain_for_s": float("nan")},
        {"retain_for_s": -1},
        {"retain_for_s": 10**400},
        {"retain_for_s": True},
        {"conversation_id": 7},
        {"conversation_id": ""},
        {"conversation_id": "c" * 999},
        {"exclude": "lmdb"},
        {"exclude": [1]},
        {"exclude": ["t"] * 999},
        {"exclude_media": ["paper"]},
        {"exclude_remote": 1},
        {"source": 7450},
        {"source": "host-b"},
        {"source": "unix:/run/kvtier.sock"},
        {"source": "\ud800:7450"},
        {"source": "h" * 400 + ":1"},
        {"min_hit_tokens": -1},
        {"min_hit_tokens": 1 << 40},
        {"min_hit_tokens": 2.5},
        {"offload_policy": "all"},
        {"offload_policy": {}},
        {"skip_load": "yes"},
        {"skip_save": None},
        {"retain_for": 60},
        [],
        "x" * 9999,
    ],
)
def test_what_is_wrong_is_one_warning(wrong: Any) -> None:
    """The other settings apply, and the request goes on."""
    warnings: list[str] = []
    given = wrong | {"skip_load": True} if isinstance(wrong, dict) and "skip_load" not in wrong else wrong
    settings = RequestSettings.parse({"kvtier": given}, warnings.append)
    assert settings == RequestSettings(skip_load=given is not wrong)
    assert len(warnings) == 1
    assert len(warnings[0]) < 400
    assert "of a request" in warnings[0]
    assert _run(FakeClient(set(KEYS[:2])), wrong) == (8, KEYS[2:4])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"retain_for_s": 30 * 86400}, {"retain_for_s": 30 * 86400 + 1}),
        ({"retain_for_s": 0}, {"retain_for_s": -0.1}),
        ({"conversation_id": "c" * 128}, {"conversation_id": "c" * 129}),
        ({"hold_as": "h"}, {"hold_as": ""}),
        ({"exclude": ["t"] * 16}, {"exclude": ["t"] * 17}),
        ({"exclude": ["t" * 128]}, {"exclude": ["t" * 129]}),
        ({"exclude_media": ["disk", "network"]}, {"exclude_media": ["disk", "paper"]}),
        ({"source": "h" * 250 + ":1"}, {"source": "h" * 299 + ":1"}),
        ({"min_hit_tokens": (1 << 31) - 1}, {"min_hit_tokens": 1 << 31}),
        ({"min_hit_tokens": 0}, {"min_hit_tokens": True}),
        ({"hold": False}, {"hold": 0}),
        ({"skip_load": True}, {"skip_load": 1}),
    ],
    ids=str,
)
def test_the_limits_of_settings(right: dict[str, Any], wrong: dict[str, Any]) -> None:
    """The last value that is accepted, and the first that is not."""
    warnings: list[str] = []
    RequestSettings.parse({"kvtier": right}, warnings.append)
    assert not warnings
    assert RequestSettings.parse({"kvtier": wrong}, warnings.append) == RequestSettings()
    assert len(warnings) == 1


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"kvtier": None}, "text"])
def test_no_settings_are_no_warning(params: Any) -> None:
    """B1.2 Absent means an ordinary request."""
    warnings: list[str] = []
    assert RequestSettings.parse(params, warnings.append) == RequestSettings()
    assert not warnings


def test_a_priority_that_no_server_takes_is_the_nearest_one() -> None:
    """Users set the number."""
    client = FakeClient()
    _run(client, {}, priority=-(10**30))
    assert client.options[0] == {"priority": (1 << 31) - 1}


def test_parameters_for_other_connectors_that_are_too_long_do_not_reach_the_server() -> None:
    """Users choose them. The server would refuse the request, so that it would not be cached."""
    assert plain_params({"flag": True, "blocks": "x" * 2000}) == {"flag": True}
    assert plain_params({str(number): "x" * 1000 for number in range(17)}) is None
    for unknown in ({"n": float("nan")}, {"o": object()}, None):
        assert plain_params(unknown) is None
