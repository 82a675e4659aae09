"""`kvtier leases` and `kvtier explain` against a real server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import command_line
from harness.launch import Launched, launch
from harness.payloads import key_of, namespace_of, payload

from kvtier.client import Client, HandoffDirection, HoldGone, HoldName, NotClaimedReason, PublishStatus

PART = 64 << 10
REGION_BLOCKS = 64


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Launched]:
    """Yields a server with a CPU tier only, of 64 blocks."""
    with launch(tmp_path, "--cpu-only", region=f"{REGION_BLOCKS * PART}") as server:
        server.wait_ready()
        yield server


@pytest.fixture
def client(server: Launched, tmp_path: Path) -> Iterator[Client]:
    assert server.pid
    with Client(f"unix:{tmp_path}/s", namespace=namespace_of(PART), name="unit", engine_id="e7") as client:
        client.wait_until_connected(60)
        yield client


@pytest.fixture
def reader(server: Launched, tmp_path: Path) -> Iterator[Client]:
    """Yields another engine of the same namespace."""
    assert server.pid
    with Client(f"unix:{tmp_path}/s", namespace=namespace_of(PART), engine_id="d1") as client:
        client.wait_until_connected(60)
        yield client


def kvtier(tmp_path: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return command_line.kvtier(*arguments, "--endpoint", f"unix:{tmp_path}/s", code=code)


def answer(tmp_path: Path, *arguments: str) -> Any:
    return command_line.json_output(*arguments, "--endpoint", f"unix:{tmp_path}/s")


def store(client: Client, *numbers: int) -> list[bytes]:
    keys = [key_of(number) for number in numbers]
    half = len(keys) // 2  # open stores pin only a part of the CPU tier
    for part in (keys[:half], keys[half:]):
        client.store(part, [payload(key, PART) for key in part])
    return keys


def test_leases_are_listed_with_owners_and_ages(client: Client, tmp_path: Path) -> None:
    """Leases of readers and writers, the oldest first; ended ones are not listed."""
    assert kvtier(tmp_path, "leases").stdout == "no leases\n"
    keys = store(client, 0, 1, 2)
    with client.lookup(keys, request_id="r1", lease=60) as lease, client.write([key_of(9)], request_id="r2"):
        listed = answer(tmp_path, "leases")
        text = kvtier(tmp_path, "leases").stdout
        first = answer(tmp_path, "leases", "--most", "1")
    assert listed["total"] == 2
    read, write = listed["leases"]
    assert (read["lease_id"], read["kind"], read["request_id"], read["blocks"]) == (lease.id, "read", "r1", 3)
    assert (read["bytes"], read["pending_blocks"]) == (3 * PART, 0)
    assert (write["kind"], write["request_id"], write["blocks"], write["bytes"]) == ("write", "r2", 1, PART)
    for one in (read, write):
        assert (one["engine_id"], one["client_name"], one["pid"]) == ("e7", "unit", os.getpid())
        assert 0 <= one["age_seconds"] < 30
    assert 30 < read["remaining_seconds"] <= 60
    for piece in ("read", "write", "r1", "r2", "e7", "unit"):
        assert piece in text
    assert (first["total"], first["leases"]) == (2, [first["leases"][0]])
    assert answer(tmp_path, "leases")["total"] == 0


def test_a_request_is_explained_per_block(client: Client, tmp_path: Path) -> None:
    """Each block has the tier that had it, or the reason of its miss."""
    keys = store(client, *range(REGION_BLOCKS))
    store(client, *range(1000, 1010))
    with client.begin_request("chat-1", [*keys[:40], key_of(9999)], prefix=False):
        pass
    told = answer(tmp_path, "explain", "chat-1")
    assert (told["engine_id"], told["finished"], told["total_lookups"]) == ("e7", False, 1)
    spans = told["lookups"][0]["spans"]
    assert sum(span["keys"] for span in spans) == 41
    assert {span.get("hit_tier") or span["miss_reason"] for span in spans} <= {"cpu", "evicted", "never_stored"}
    assert spans[-1] == {"keys": 1, "miss_reason": "never_stored"}
    client.lookup([key_of(9999)], request_id="chat-1").release()
    client.finish_request("chat-1", wait=30)
    text = kvtier(tmp_path, "explain", "chat-1", "--engine", "e7").stdout
    for piece in ("chat-1", "e7", "finished", "block 0: miss, never_stored", key_of(9999).hex()):
        assert piece in text
    evicted = answer(tmp_path, "explain", "chat-1")["lookups"][0]
    assert evicted["spans"] == spans, "the first lookup stays beside the second"


def test_evicted_blocks_are_explained(client: Client, tmp_path: Path) -> None:
    """After the whole region is replaced, all earlier blocks are missed as evicted."""
    keys = store(client, *range(REGION_BLOCKS))
    for start in (1000, 2000):
        store(client, *range(start, start + REGION_BLOCKS))
    client.lookup(keys[-1:], request_id="late").release()
    [span] = answer(tmp_path, "explain", "late")["lookups"][0]["spans"]
    assert span == {"keys": 1, "miss_reason": "evicted"}


def test_misses_below_the_threshold_or_of_another_format(client: Client, tmp_path: Path) -> None:
    """The client can avoid both reasons."""
    keys = store(client, 0, 1)
    assert client.lookup(keys, request_id="short", min_hits=3).prefix_hits == 0
    with Client(f"unix:{tmp_path}/s", namespace=namespace_of(PART, model="other")) as other:
        other.lookup(keys, request_id="strange").release()
    for request, reason in (("short", "below_threshold"), ("strange", "format_mismatch")):
        [span] = answer(tmp_path, "explain", request)["lookups"][0]["spans"]
        assert span == {"keys": 2, "miss_reason": reason}


def test_an_unknown_request_exits_with_1(client: Client, tmp_path: Path) -> None:
    """A request of another engine is unknown, too; the error is one line."""
    store(client, 0)
    client.lookup([key_of(0)], request_id="mine").release()
    for arguments in (("unknown",), ("mine", "--engine", "other")):
        done = kvtier(tmp_path, "explain", *arguments, code=1)
        assert "there is no record of request" in done.stderr
    kvtier(tmp_path, "leases", "--most", "-1", code=2)


def test_a_handoff_is_explained_on_both_sides(client: Client, reader: Client, tmp_path: Path) -> None:
    """P: the publication and its end. D: the claimed hold, and the result of each block."""
    keys = store(client, 0, 1, 2)
    client.publish("p-1", [*keys, key_of(9)], range(4), num_tokens=64, hold_for=60)
    reader.claim(HoldName("e7", "p-1"), request_id="d-1", first_positions=[1], wait=0.1).release()
    reader.release_holds(HoldName("e7", "p-1"))
    with pytest.raises(HoldGone):
        reader.claim(HoldName("e7", "p-1"), request_id="d-1")
    [hold] = answer(tmp_path, "explain", "p-1")["holds"]
    assert 0 <= hold.pop("end_age_seconds") <= hold.pop("age_seconds") < 30
    assert hold == {
        "direction": "prefill_to_decode",
        "status": "published",
        "num_tokens": 64,
        "blocks": 4,
        "pending_blocks": 1,
        "claims": 1,
        "claimed_blocks": 2,
        "end": "released",
    }
    told = answer(tmp_path, "explain", "d-1")
    assert (told["engine_id"], told["total_lookups"], told["holds"]) == ("d1", 2, [])
    first, second = told["lookups"]
    named = {"engine_id": "e7", "request_id": "p-1"}
    assert first["claim"] == named | {"outcome": "held", "unwanted_blocks": 1}
    assert first["spans"] == [{"keys": 2, "hit_tier": "cpu"}, {"keys": 1, "miss_reason": "pending"}]
    assert first["first_missed_key"] == key_of(9).hex()
    assert (second["claim"], second["spans"]) == (named | {"outcome": "not_held", "unwanted_blocks": 0}, [])
    published, claimed = kvtier(tmp_path, "explain", "p-1").stdout, kvtier(tmp_path, "explain", "d-1").stdout
    for piece in (
        "(prefill to decode, 4 blocks of 64 tokens, 1 of them not yet stored)",
        "claimed 1 times, 2 blocks, was released",
    ):
        assert piece in published
    for piece in (
        "claim of request p-1 of engine e7",
        "the hold was found",
        "1 blocks were not requested; the other blocks:",
        "blocks 0-1: hit in cpu",
        "block 2: miss, pending: a store of the blocks was still running",
        "there was no hold",
    ):
        assert piece in claimed


def test_failed_handoffs_are_explained(client: Client, reader: Client, tmp_path: Path) -> None:
    """A declined publication names the setting to raise.

    A claim names another model, or its lateness.
    """
    keys = store(client, *range(48))
    back = HandoffDirection.DECODE_TO_PREFILL
    assert client.publish("big", keys, range(48), num_tokens=768, direction=back).status is PublishStatus.NO_ROOM
    client.publish("small", keys[:1], [0], num_tokens=16, hold_for=60)
    with Client(f"unix:{tmp_path}/s", namespace=namespace_of(PART, model="other"), engine_id="d2") as other:
        other.wait_until_connected(60)
        with pytest.raises(HoldGone):
            other.claim(HoldName("e7", "small"), request_id="d-2")
    client.publish("brief", keys[:1], [0], num_tokens=16, hold_for=4)
    with pytest.raises(HoldGone):
        reader.claim(HoldName("e7", "brief"), request_id="d-1", wait=1)
    assert "the hold had expired, or was about to expire" in kvtier(tmp_path, "explain", "d-1").stdout
    reader.lookup(keys[:1], request_id="d-3").release()
    assert "is still held" in kvtier(tmp_path, "explain", "small").stdout
    big = kvtier(tmp_path, "explain", "big").stdout
    for piece in (
        "declined",
        "decode to prefill, 48 blocks of 768 tokens",
        "reached their fraction of the CPU tier (handoff.part)",
    ):
        assert piece in big
    assert "the hold is in another namespace" in kvtier(tmp_path, "explain", "d-2").stdout
    [lookup] = answer(tmp_path, "explain", "d-3")["lookups"]
    assert lookup["claim"] is None


def test_requests_that_engines_do_not_claim_are_explained(reader: Client, tmp_path: Path) -> None:
    """`kvtier handoffs` counts them by reason, and `kvtier explain` names the setting to change."""
    for number, reason in enumerate((*NotClaimedReason, NotClaimedReason.PEER_NOT_LISTED)):
        reader.report_not_claimed(HoldName("far", "r"), request_id=f"n-{number}", reason=reason)
    assert (
        "computed instead of pulled since start: 2 held by a server that the engine's `peers` do not name, "
        "1 of which the other engine holds nothing" in kvtier(tmp_path, "handoffs").stdout
    )
    assert answer(tmp_path, "handoffs")["missed_claims"] == {"peer_not_listed": 2, "nothing_held": 1}
    assert (
        "the engine's settings (`peers`) do not name the server of the hold"
        in kvtier(tmp_path, "explain", "n-0").stdout
    )
    assert "the other engine holds no blocks" in kvtier(tmp_path, "explain", "n-1").stdout


def test_enums_have_one_spelling_in_json(client: Client, reader: Client, tmp_path: Path) -> None:
    """Each command prints the same lower-case words, joined by underscores."""
    keys = store(client, 0, 1)
    client.publish("p-1", keys, [0, 1], num_tokens=32, hold_for=60)
    with reader.lookup(keys, request_id="d-1"):
        directions = {
            answer(tmp_path, "explain", "p-1")["holds"][0]["direction"],
            answer(tmp_path, "handoffs")["handoffs"][0]["direction"],
        }
        directions |= {totals["direction"] for totals in answer(tmp_path, "status")["handoffs"] if totals["open"]}
        directions |= {totals["direction"] for totals in answer(tmp_path, "handoffs")["totals"] if totals["open"]}
        kinds = {lease["kind"] for lease in answer(tmp_path, "leases")["leases"]}

    assert directions == {"prefill_to_decode"}
    assert kinds == {"read"}
    assert "prefill to decode" in kvtier(tmp_path, "handoffs").stdout
