"""What the tier learns of requests and tells the server: offload policies, and uses of chunks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness.polling import wait_until
from tier_fixtures import KEYS, TierParts, keys_of, make_tier_parts

from kvtier.client import InvalidRequest, KVTierError, LimitExceeded, NotConnected, OffloadPolicy
from kvtier.client.engines.vllm import background
from kvtier.client.engines.vllm_tier import tier_lookups
from kvtier.client.engines.vllm_tier.tier_lookups import Answer

FLAG = {"do_remote_decode": True}
BLOCK, REQUEST = OffloadPolicy.BLOCK_LEVEL, OffloadPolicy.REQUEST_LEVEL


@pytest.fixture
def room() -> Iterator[TierParts]:
    """Transfers and lookups over a fake client."""
    with make_tier_parts() as made:
        yield made


def test_a_policy_is_what_the_server_said_of_the_last_request_of_its_kind(room: TierParts) -> None:
    """B3.1 Of the usual kinds the server is asked first; the first of another is stored whole."""
    lookups, client = room.lookups, room.client
    client.policy = BLOCK
    lookups.ask_policies()
    kinds: list[tuple[dict[str, Any] | None, OffloadPolicy, OffloadPolicy]] = [
        (None, BLOCK, REQUEST),
        (FLAG, BLOCK, REQUEST),
        ({"offload_policy": "request_level"}, BLOCK, REQUEST),
        ({"offload_policy": "block_level"}, BLOCK, REQUEST),
        ({"gold": True}, REQUEST, BLOCK),
    ]
    for params, at_first, answer in kinds:
        first = lookups.begin(f"first {params}", params)
        assert lookups.policy_of(first) is at_first
        client.policy = answer
        assert lookups.answer(first, KEYS[0], 16) is Answer.UNKNOWN
        lookups.send(first)
        wait_until(lambda first=first: lookups.answer(first, KEYS[0], 16) is Answer.MISS)  # type: ignore[misc]
        assert lookups.policy_of(lookups.begin(f"second {params}", params)) is answer
        assert client.begun[f"first {params}"] == (16, params)


def test_policies_are_asked_again_of_another_run_of_the_server(room: TierParts) -> None:
    """B3.1 A restarted server may have other rules; until it has answered, all is stored whole."""
    lookups, client = room.lookups, room.client
    lookups.ask_policies()
    client.begun.clear()
    plain = lookups.begin("plain", None)
    assert lookups.policy_of(plain) is BLOCK
    client.epoch, answered = 2, threading.Event()
    client.before = lambda: (answered.wait(60), None)[1]
    assert lookups.policy_of(plain) is REQUEST
    answered.set()
    wait_until(lambda: lookups.policy_of(plain) is BLOCK)
    assert "policy-0" in client.begun


@pytest.mark.parametrize(("params", "policy"), [(None, BLOCK), (FLAG, REQUEST), ({"gold": True}, BLOCK)])
def test_without_a_server_the_policy_is_that_of_the_default_rules(
    room: TierParts, params: dict[str, Any] | None, policy: OffloadPolicy
) -> None:
    """B1.6 vLLM then copies no more for kvtier than it must."""
    room.client.connected, room.client.epoch = False, None
    room.lookups.ask_policies()
    assert room.lookups.policy_of(room.lookups.begin("r", params)) is policy
    assert not room.client.begun


def test_chunks_that_vllm_did_not_ask_for_are_marked_as_used(room: TierParts) -> None:
    """B4.9 At its end a request marks what the engine had itself, and nothing a second time."""
    room.client.keys = {KEYS[1], *KEYS[2:]}
    request = room.lookups.begin("r", None)
    room.lookups.answer(request, KEYS[3], 64)
    room.lookups.send(request)
    wait_until(lambda: room.lookups.answer(request, KEYS[3], 64) is Answer.HIT)
    room.lookups.mark_scheduled(request)
    end_tokens = {key: 16 * (number + 1) for number, key in enumerate(KEYS[1:3], start=1)}
    room.lookups.touch(request, dict(reversed(end_tokens.items())))
    wait_until(lambda: room.client.marked == [KEYS[1:3]])
    room.lookups.end(request, dict.fromkeys(KEYS, 16))
    wait_until(lambda: "finished r" in room.client.told)
    assert room.client.marked[1:] == [[], []], "the server has only keys that are marked already"
    assert room.client.told[-1] == "finished r"


def test_a_pin_ends_before_the_lease_of_the_server(room: TierParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """B4.3 By default a lease has 60 s, and some of them are needed for the copy."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(tier_lookups, "time", SimpleNamespace(monotonic=lambda: clock.now))
    room.client.keys = set(KEYS)
    request = room.lookups.begin("r", None)
    room.lookups.answer(request, KEYS[0], 16)
    room.lookups.send(request)
    wait_until(lambda: room.lookups.answer(request, KEYS[0], 16) is Answer.HIT)
    clock.now += 39.0
    assert room.lookups.answer(request, KEYS[0], 16) is Answer.HIT
    clock.now += 2.0
    assert room.lookups.answer(request, KEYS[0], 16) is Answer.UNKNOWN


def test_windows_are_marked_from_their_end(room: TierParts) -> None:
    """B4.10 Of a window group the server has only the last chunks of a prompt."""
    request = room.lookups.begin("r", None)
    room.lookups.mark_scheduled(request)
    windows = keys_of(4, group=1)
    room.client.keys = {*KEYS, *windows[2:]}
    room.lookups.end(request, {key: 16 * (number % 4) for number, key in enumerate([*KEYS, *windows])})
    wait_until(lambda: "finished r" in room.client.told)
    assert room.client.marked == [KEYS, [], [windows[3], windows[2]]]


@pytest.mark.parametrize("case", ["has not run", "skips loads", "no server"])
def test_nothing_is_marked_for_a_request_that_used_nothing(room: TierParts, case: str) -> None:
    """A request that never ran, or must not load, marks nothing."""
    request = room.lookups.begin("r", {"kvtier": {"skip_load": case == "skips loads"}})
    if case != "has not run":
        room.lookups.mark_scheduled(request)
    room.client.connected = case != "no server"
    room.client.keys = set(KEYS)
    room.lookups.end(request, dict.fromkeys(KEYS, 16))
    if case != "no server":
        wait_until(lambda: "finished r" in room.client.told)
    assert room.client.marked == []


def test_a_server_that_fails_is_not_asked_to_mark_more(room: TierParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is a warning, and pauses the calls. Requests that wait to be marked still end."""
    monkeypatch.setattr(background, "_CIRCUIT_OPEN_S", 3600.0)
    failures, may_fail = [], threading.Event()

    def fail() -> None:
        may_fail.wait(60)
        failures.append("gone")
        raise NotConnected("gone")

    room.client.before = fail
    for name in ("first", "second"):
        request = room.lookups.begin(name, None)
        room.lookups.mark_scheduled(request)
        room.lookups.end(request, dict.fromkeys([*KEYS, *keys_of(4, group=1)], 16))
    may_fail.set()
    wait_until(lambda: {"finished first", "finished second"} <= set(room.client.told))
    assert failures == ["gone"]
    assert room.lookups.circuit.is_open


def test_marks_that_are_late_are_dropped(room: TierParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of leases wait behind them."""
    monkeypatch.setattr(tier_lookups, "_TOUCH_SECONDS", 0.0)
    request = room.lookups.begin("r", None)
    room.lookups.mark_scheduled(request)
    room.client.keys = set(KEYS)
    room.lookups.end(request, dict.fromkeys(KEYS, 16))
    wait_until(lambda: "finished r" in room.client.told)
    assert room.client.marked == []
    assert not room.lookups.circuit.is_open


@pytest.mark.parametrize(
    ("error", "pauses"), [(NotConnected("gone"), True), (LimitExceeded("full"), False), (InvalidRequest("odd"), False)]
)
@pytest.mark.parametrize("leases", [None, [1, 1, 1, 1]])
def test_a_transfer_that_fails_is_reported(
    room: TierParts, monkeypatch: pytest.MonkeyPatch, error: KVTierError, leases: Any, *, pauses: bool
) -> None:
    """Only a server that cannot be reached pauses the calls. Then a load fails at once."""
    monkeypatch.setattr(background, "_CIRCUIT_OPEN_S", 3600.0)

    def fail() -> None:
        raise error

    room.client.hand_out = fail
    request = room.lookups.begin("r", None)
    room.transfers.submit(room.job(1, request, leases))
    assert room.finished() == {1: frozenset()}
    assert room.lookups.circuit.is_open is pauses
    room.client.hand_out = lambda: None
    room.transfers.submit(room.job(2, request, [1] * 4))
    assert room.finished() == {2: frozenset() if pauses else frozenset(KEYS)}
    room.client.connected = False
    room.transfers.submit(room.job(3, request))
    assert room.finished() == {3: frozenset()}


def test_an_answer_for_a_request_that_has_ended_is_not_used(room: TierParts) -> None:
    """The server releases the leases of the request, so their hits are no longer protected."""
    answered, asked = threading.Event(), threading.Event()
    room.client.keys = set(KEYS)
    room.client.before = lambda: (asked.set(), answered.wait(60), None)[2]
    request = room.lookups.begin("r", None)
    room.lookups.answer(request, KEYS[0], 16)
    room.lookups.send(request)
    assert asked.wait(60)
    room.lookups.end(request, {})
    answered.set()
    wait_until(lambda: "finished r" in room.client.told)
    room.lookups._take_done()
    assert not room.lookups._done
    assert request.known == {}
    assert request.leases == []


def test_the_server_is_not_asked_for_more_policies_after_a_failure(room: TierParts) -> None:
    """Its start must not take four timeouts."""
    calls: list[str] = []

    def fail() -> None:
        calls.append("asked")
        raise NotConnected("gone")

    room.client.before = fail
    room.lookups.ask_policies()
    assert calls == ["asked"]


def test_the_table_of_policies_is_bounded(room: TierParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users choose the parameters of their requests."""
    monkeypatch.setattr(tier_lookups, "_MAX_KINDS", 3)
    for number in range(10):
        registration = room.lookups.begin(f"r{number}", {f"name {number}": 1}).registration
        room.lookups.lookup_keys(registration, ())
        assert 1 <= len(room.lookups._policies) <= 3
