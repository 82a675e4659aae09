"""`kvtier leases` and `kvtier explain`, of a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.launch import Launched, launch
from harness.payloads import key_of, namespace_of, payload

from kvtier.client import Client

PART = 64 << 10
REGION_BLOCKS = 64


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Launched]:
    """A server with a CPU tier only, of 64 blocks."""
    with launch(tmp_path, "--cpu-only", region=f"{REGION_BLOCKS * PART}") as server:
        server.wait_ready()
        yield server


@pytest.fixture
def client(server: Launched, tmp_path: Path) -> Iterator[Client]:
    """A client of that server."""
    assert server.pid
    with Client(f"unix:{tmp_path}/s", namespace=namespace_of(PART), name="unit", engine_id="e7") as client:
        client.wait_until_connected(10)
        yield client


def kvtier(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line against the server."""
    return subprocess.run(
        [sys.executable, "-m", "kvtier.server", *arguments, "--endpoint", f"unix:{tmp_path}/s"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def answer(tmp_path: Path, *arguments: str) -> Any:
    """Returns what the command line says, in JSON."""
    done = kvtier(tmp_path, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def store(client: Client, *numbers: int) -> list[bytes]:
    """Stores blocks; returns their keys."""
    keys = [key_of(number) for number in numbers]
    client.store(keys, [payload(key, PART) for key in keys])
    return keys


def test_leases_are_listed_with_owners_and_ages(client: Client, tmp_path: Path) -> None:
    """Readers and writers, the oldest first; those that ended are gone."""
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


def test_a_request_is_explained(client: Client, tmp_path: Path) -> None:
    """For each of its blocks: where it was found, or why it was not."""
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
    client.finish_request("chat-1", wait=5)
    text = kvtier(tmp_path, "explain", "chat-1", "--engine", "e7").stdout
    for piece in ("chat-1", "e7", "finished", "block 0: miss, never_stored", key_of(9999).hex()):
        assert piece in text
    evicted = answer(tmp_path, "explain", "chat-1")["lookups"][0]
    assert evicted["spans"] == spans, "the first lookup is kept beside the second"


def test_what_was_evicted_is_said_to_be(client: Client, tmp_path: Path) -> None:
    """The whole region is replaced: all that was there is missed for that reason."""
    keys = store(client, *range(REGION_BLOCKS))
    for start in (1000, 2000):
        store(client, *range(start, start + REGION_BLOCKS))
    client.lookup(keys[-1:], request_id="late").release()
    [span] = answer(tmp_path, "explain", "late")["lookups"][0]["spans"]
    assert span == {"keys": 1, "miss_reason": "evicted"}


def test_below_threshold_and_other_format(client: Client, tmp_path: Path) -> None:
    """Two reasons that only the one who asks can mend."""
    keys = store(client, 0, 1)
    assert client.lookup(keys, request_id="short", min_hits=3).prefix_hits == 0
    with Client(f"unix:{tmp_path}/s", namespace=namespace_of(PART, model="other")) as other:
        other.wait_until_connected(10)
        other.lookup(keys, request_id="strange").release()
    for request, reason in (("short", "below_threshold"), ("strange", "format_mismatch")):
        [span] = answer(tmp_path, "explain", request)["lookups"][0]["spans"]
        assert span == {"keys": 2, "miss_reason": reason}


def test_a_request_that_nobody_knows(client: Client, tmp_path: Path) -> None:
    """A line that says so, and exit code 1; likewise one of another engine."""
    store(client, 0)
    client.lookup([key_of(0)], request_id="mine").release()
    for arguments in (("nobody",), ("mine", "--engine", "other")):
        done = kvtier(tmp_path, "explain", *arguments)
        assert done.returncode == 1
        assert "nothing is known of request" in done.stderr
    assert kvtier(tmp_path, "leases", "--most", "-1").returncode == 2
