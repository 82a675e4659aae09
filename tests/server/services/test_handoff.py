"""Hand-off through a real server: waits, ends, outcomes, and their display."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from harness import command_line
from harness.payloads import key_of, namespace_of, payload
from harness.polling import polls
from harness.server_process import MIB, ServerProcess

from kvtier.client import (
    Client,
    DurableStatus,
    HandoffDirection,
    HoldGone,
    HoldName,
    KeyStatus,
    Lease,
    PublishStatus,
    StoreStatus,
    Timeouts,
    make_hold_key,
)

PART = 64 << 10
HIT, MISS, PENDING = (bytes([status]) for status in (KeyStatus.HIT, KeyStatus.MISS, KeyStatus.HIT_PENDING))
HOLD = HoldName("prefill", "r")
TIMEOUTS = Timeouts(connect=60.0, call=60.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Yields a server that lets three requests hold up to half of its region."""
    config = 'metrics = "127.0.0.1:0"\n[handoff]\npart = 0.5\nmax_holds = 3\n'
    with ServerProcess(tmp_path, region=16 * MIB, config=config) as process:
        yield process.start()


@pytest.fixture
def connect(server: ServerProcess) -> Iterator[Callable[[str], Client]]:
    """Returns a function that makes a client per engine."""
    clients: list[Client] = []

    def make(engine_id: str) -> Client:
        client = Client(server.endpoint, namespace=namespace_of(PART), engine_id=engine_id, timeouts=TIMEOUTS)
        clients.append(client)
        client.wait_until_connected()
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def prefill(connect: Callable[[str], Client]) -> Client:
    return connect("prefill")


@pytest.fixture
def decode(connect: Callable[[str], Client]) -> Client:
    return connect("decode")


def stored(client: Client, count: int, *, salt: str = "") -> list[bytes]:
    keys = [key_of(number, salt=salt) for number in range(count)]
    assert set(client.store(keys, [payload(key, PART) for key in keys])) == {StoreStatus.GRANTED}
    return keys


def published(client: Client, keys: list[bytes], request_id: str = "r", **fields: Any) -> PublishStatus:
    return client.publish(request_id, keys, range(len(keys)), num_tokens=16 * len(keys), **fields).status


class WaitingClaim:
    def __init__(self, client: Client, wait: float = 20.0, **more: Any) -> None:
        self._found: list[Lease | HoldGone] = []

        def claim() -> None:
            try:
                self._found.append(client.claim(HOLD, wait=wait, **more))
            except HoldGone as gone:
                self._found.append(gone)

        self._thread = threading.Thread(target=claim)
        self._thread.start()

    def waits(self) -> bool:
        """Returns whether it still waits after a moment."""
        self._thread.join(0.2)
        return self._thread.is_alive()

    def result(self) -> Lease | HoldGone:
        self._thread.join(60)
        (found,) = self._found
        return found

    def lease(self) -> Lease:
        found = self.result()
        assert isinstance(found, Lease)
        return found


def test_a_claim_waits_for_publication_and_blocks(prefill: Client, decode: Client) -> None:
    """The reader may claim first: it gets its answer when the last block is stored."""
    claiming = WaitingClaim(decode)
    assert claiming.waits()
    keys = [key_of(number) for number in range(3)]
    assert published(prefill, keys) is PublishStatus.PUBLISHED
    assert claiming.waits()
    stored(prefill, 3)
    with claiming.lease() as lease:
        assert lease.statuses == HIT * 3


def test_a_claim_gets_the_first_blocks_while_others_are_computed(prefill: Client, decode: Client) -> None:
    """Each claim waits for one block more than the previous one, in the order of the stores."""
    keys = [key_of(number) for number in range(4)]
    published(prefill, keys)
    seen, settled = [], 0
    for count in (1, 3, 4):
        claiming = WaitingClaim(decode, min_blocks=settled + 1)
        assert claiming.waits()
        new = keys[settled:count]
        prefill.store(new, [payload(key, PART) for key in new])
        with claiming.lease() as lease:
            seen.append(lease.statuses)
            settled = lease.hold.settled_blocks
            assert settled == count
    assert seen == [HIT + PENDING * 3, HIT * 3 + PENDING, HIT * 4]


def test_a_claim_ends_at_its_wait(prefill: Client, decode: Client) -> None:
    """Blocks that are still missing are pending; a hold that is not published does not exist."""
    assert isinstance(WaitingClaim(decode, 0.1).result(), HoldGone)
    keys = [*stored(prefill, 1), key_of(99)]
    published(prefill, keys)
    with WaitingClaim(decode, 0.1).lease() as lease:
        assert lease.statuses == HIT + PENDING


def test_the_end_of_the_publisher_ends_the_wait(prefill: Client, decode: Client, server: ServerProcess) -> None:
    """Its stored blocks are granted, also later; the rest are misses at once."""
    keys = [*stored(prefill, 2), key_of(99)]
    published(prefill, keys, hold_for=60)
    claiming = WaitingClaim(decode)
    assert claiming.waits()
    prefill.close()
    with claiming.lease() as lease:
        assert lease.statuses == HIT * 2 + MISS
    assert server.status().holds == 1


@pytest.mark.slow
def test_the_end_of_the_hold_ends_the_wait(prefill: Client, decode: Client, server: ServerProcess) -> None:
    """Shortly before its end the claim is told so; after a reset the hold does not exist."""
    published(prefill, [key_of(99)], hold_for=8)
    claiming = WaitingClaim(decode)
    assert claiming.waits()
    gone = claiming.result()
    assert isinstance(gone, HoldGone)
    assert gone.reason == "HOLD_EXPIRED"
    server.wait_for(lambda status: status.holds == 0)
    published(prefill, [key_of(99)])
    assert prefill.reset() == 0
    assert isinstance(WaitingClaim(decode, 0.1).result(), HoldGone)


def test_held_blocks_survive_a_flood(prefill: Client, decode: Client) -> None:
    """B2.17: after a flood of ten times the region, every byte of a hold is readable."""
    keys = stored(prefill, 32)
    published(prefill, keys, hold_for=300)
    prefill.close()
    for number in range(10):
        names = [key_of(block, salt=f"flood {number}") for block in range(256)]
        decode.store(names, [bytes(PART)] * 256)
    with decode.claim(HOLD) as claim:
        assert claim.statuses == HIT * 32
        with decode.read(claim, range(32)) as batch:
            assert [bytes(view) for view in batch.views()] == [payload(key, PART).tobytes() for key in keys]


def test_holds_beyond_the_limits_are_declined(prefill: Client, connect: Callable[[str], Client]) -> None:
    """Too many bytes or requests give a status, not an error, and the cache continues."""
    keys = stored(prefill, 160)
    assert published(prefill, keys) is PublishStatus.NO_ROOM
    assert published(prefill, keys[:100]) is PublishStatus.PUBLISHED
    for number in range(2):
        assert published(connect(f"e{number}"), keys[:1]) is PublishStatus.PUBLISHED
    assert published(prefill, keys[:1], "another") is PublishStatus.TOO_MANY
    assert published(prefill, keys[:1]) is PublishStatus.PUBLISHED, "replaces the first"
    with prefill.lookup(keys) as lease:
        assert lease.prefix_hits == 160


def test_a_restart_ends_all_holds(prefill: Client, decode: Client, server: ServerProcess) -> None:
    """Full blocks are on disk as usual; a partial block, which only the hold names, is gone."""
    keys = stored(prefill, 4)
    partial = make_hold_key("prefill", "r", 0, 4)
    prefill.store([partial], [bytes(PART)])
    published(prefill, [*keys, partial], hold_for=300)
    assert set(prefill.flush([*keys, partial], wait=30)) == {DurableStatus.DURABLE, DurableStatus.VOLATILE}
    server.restart()
    decode.wait_until_connected(60)
    for _ in polls():  # the client notices the restart a moment later
        with contextlib.suppress(Exception):  # any error of the connection
            lease = decode.lookup([*keys, partial], prefix=False, wait=30)
            break
    assert lease.statuses == HIT * 4 + MISS
    lease.release()
    with pytest.raises(HoldGone):
        decode.claim(HOLD)


def test_a_client_renews_and_releases_any_number_of_holds(prefill: Client) -> None:
    """One call can name 1,024 holds, so the client makes several calls."""
    published(prefill, stored(prefill, 4), hold_for=300)
    others = [HoldName("prefill", f"other-{number}") for number in range(5000)]
    assert prefill.renew_holds(*others[:4500], HOLD, *others[4500:]) == others
    prefill.release_holds(*others, HOLD)
    assert prefill.renew_holds(HOLD) == [HOLD]


def test_the_end_of_a_server_does_not_wait_for_holds(prefill: Client, server: ServerProcess) -> None:
    """They pin memory that ends with the server."""
    published(prefill, stored(prefill, 4), hold_for=300)
    began = time.monotonic()
    assert server.terminate() == 0
    assert time.monotonic() - began < 45


def kvtier(server: ServerProcess, *arguments: str, code: int = 0) -> str:
    return command_line.kvtier("handoffs", *arguments, "--endpoint", server.endpoint, code=code).stdout


def test_holds_are_listed(prefill: Client, decode: Client, server: ServerProcess) -> None:
    """The list has owner, age and size of each hold, and totals per direction."""
    assert kvtier(server) == "no request is held\n"
    keys = stored(prefill, 3)
    published(prefill, [*keys, key_of(99)], hold_for=60)
    published(decode, keys[:1], "back", direction=HandoffDirection.DECODE_TO_PREFILL, hold_for=480)
    published(decode, keys[:1], "gone")
    decode.release_holds(HoldName("decode", "gone"))
    decode.claim(HOLD).release()
    answer = json.loads(kvtier(server, "--json"))
    first, second = answer["handoffs"]
    assert (answer["total"], answer["held_bytes"]) == (2, 4 * PART)
    assert (first["engine_id"], first["request_id"], first["direction"]) == ("prefill", "r", "prefill_to_decode")
    assert (first["num_tokens"], first["blocks"], first["bytes"], first["pending_blocks"]) == (64, 4, 4 * PART, 1)
    assert first["claims"] == 1
    assert 0 <= first["age_seconds"] < 30
    assert 30 < first["remaining_seconds"] <= 60
    assert (second["request_id"], second["direction"]) == ("back", "decode_to_prefill")
    forth, back = answer["totals"]
    assert (forth["published"], forth["open"], forth["released"], forth["claimed_bytes"]) == (2, 1, 1, 3 * PART)
    assert (back["published"], back["open"], back["claimed"]) == (1, 1, 0)
    text = kvtier(server, "--most", "1")
    for piece in ("prefill to decode", "192.0 KiB", "the oldest 1 of 2", "holds pin 256.0 KiB"):
        assert piece in text
    kvtier(server, "--most", "-1", code=2)


def test_ended_holds_are_counted(prefill: Client, decode: Client, server: ServerProcess) -> None:
    """B2.19: the counts are per direction; pinned bytes and their time are figures, too."""
    keys = stored(prefill, 3)
    back = HandoffDirection.DECODE_TO_PREFILL
    published(decode, keys, direction=back, hold_for=0.2)
    published(prefill, keys)
    published(prefill, keys)
    published(prefill, stored(prefill, 160, salt="much"), "much")
    with decode.claim(HOLD):
        pass
    decode.release_holds(HOLD)
    server.wait_for(lambda status: status.holds == 0)
    (ready,) = [line for line in map(json.loads, server.log.splitlines()) if line["event"] == "ready"]
    with urlopen(f"http://127.0.0.1:{ready['metrics_port']}/metrics", timeout=60) as answer:
        lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line.startswith("kvtier_h"))

    def figure(name: str, direction: str = "prefill_to_decode") -> float:
        return float(lines[f'kvtier_{name}{{direction="{direction}"}}'])

    names = ("published", "dropped", "released", "declined", "claimed", "claimed_bytes", "expired")
    assert [figure(f"handoffs_{name}_total") for name in names] == [2, 1, 1, 1, 1, 3 * PART, 0]
    assert figure("handoffs_expired_total", "decode_to_prefill") == 1
    assert figure("handoffs_held_seconds_total", "decode_to_prefill") >= 0.2
    missed = [lines[f'kvtier_handoffs_claims_missed_total{{outcome="{how}"}}'] for how in ("not_held", "expired")]
    assert missed == ["0.0", "0.0"]
    assert figure("holds") == figure("holds", "decode_to_prefill") == float(lines["kvtier_held_bytes"]) == 0
