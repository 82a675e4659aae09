"""Blocks that an engine reports as wrong: they are gone from all tiers of the server."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from harness.auth_site import Tokens
from harness.payloads import assert_serves, correct_hits, filled, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import MIB, ServerProcess

from kvtier.client import AccessDenied, Client, Credentials, DurableStatus, InvalidRequest

PART = 16 << 10
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(64)]
WRONG = [KEYS[20], KEYS[40]]
REMOVED = "block differs from the KV that an engine computes"


def _connected(server: ServerProcess, name: str, transport: Any = "auto", **options: Any) -> Client:
    endpoint = server.tcp if transport == "tcp" or options else server.endpoint
    client = Client(endpoint, namespace=NAMESPACE, engine_id=name, transport=transport, **options)
    client.wait_until_connected(10)
    return client


def _store(client: Client, keys: list[bytes]) -> None:
    client.store(keys, [payload(key, PART) for key in keys])


def _wrong_blocks(server: ServerProcess) -> float:
    ready = next(json.loads(line) for line in server.log.splitlines() if '"event": "ready"' in line)
    with urllib.request.urlopen(f"http://127.0.0.1:{ready['metrics_port']}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("kvtier_wrong_blocks_total")).split()[1])


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize("tier", ["lmdb", "disk"])
def test_they_are_gone_from_all_tiers(tmp_path: Path, tier: str, transport: str) -> None:
    """Also after a restart. The log names the engine that stored them, and others stay."""
    server = ServerProcess(tmp_path, tcp=True, tier=tier, config='metrics = "127.0.0.1:0"')
    with server.start():
        with _connected(server, "writing") as writing, _connected(server, "reading", transport) as reading:
            _store(writing, KEYS)
            assert set(writing.flush(KEYS, wait=10)) == {DurableStatus.DURABLE}
            reading.report_wrong(WRONG)
            assert reading.lookup(KEYS).prefix_hits == 20
            assert correct_hits(reading, KEYS[41:]) == 23
            line = next(line for line in server.log.splitlines() if REMOVED in line)
            assert '"stored_by": "writing"' in line
            assert WRONG[0].hex() in line
            assert _wrong_blocks(server) == 2
        server.kill()
        server.start()
        with _connected(server, "reading", transport) as reading:
            keys = [key for key in KEYS if key not in WRONG]
            assert [reading.load([key], filled(1, PART), wait=5) for key in WRONG] == [0, 0]
            assert reading.load(keys, filled(len(keys), PART), wait=5) == len(keys)
            _store(reading, WRONG)
            assert_serves(reading, KEYS)


def test_a_block_that_waits_for_its_tier_does_not_get_there(tmp_path: Path) -> None:
    """The report arrives directly after the store, while the block is queued or being stored."""
    with ServerProcess(tmp_path, region=64 * MIB, lmdb=64 * MIB).start() as server:
        with _connected(server, "writing") as client:
            for number in range(8):
                keys = [key_of(place, salt=f"{number}") for place in range(32)]
                _store(client, keys)
                client.report_wrong(keys[:16])
                assert set(client.flush(keys[16:], wait=10)) == {DurableStatus.DURABLE}
            wait_until(lambda: server.status().tiers[1].queued_bytes == 0)
        server.kill()
        server.start()
        with _connected(server, "writing") as client:
            for number in range(8):
                keys = [key_of(place, salt=f"{number}") for place in range(32)]
                assert client.load(keys[16:], filled(16, PART), wait=5) == 16
                assert [client.load([key], filled(1, PART), wait=5) for key in keys[:16]] == [0] * 16


def test_only_an_engine_may_report(tmp_path: Path) -> None:
    """A reader's report is refused. Other tenants have blocks of their own under the same keys."""
    tokens = Tokens(tmp_path / "tokens")
    tokens.add("writing", "acme", "engine")
    tokens.add("reading", "acme", "reader")
    tokens.add("other", "zeta", "engine")
    config = f"[auth]\ntokens = {json.dumps(str(tokens.path))}\n"
    with ServerProcess(tmp_path, config=config, tcp=True).start() as server:
        clients = {
            name: _connected(server, name, credentials=Credentials(token=tokens.token[name], insecure=True))
            for name in ("writing", "reading", "other")
        }
        for name in ("writing", "other"):
            _store(clients[name], KEYS)
        with pytest.raises(AccessDenied, match="must not report wrong blocks"):
            clients["reading"].report_wrong(WRONG)
        assert_serves(clients["reading"], KEYS)
        clients["writing"].report_wrong(WRONG)
        assert clients["reading"].lookup(KEYS).prefix_hits == 20
        assert_serves(clients["other"], KEYS)
        for client in clients.values():
            client.close()


def test_unknown_and_many_keys(tmp_path: Path) -> None:
    """Keys that the server does not have are ignored, and a report has a limit."""
    keys = [key_of(number) for number in range(300)]
    with ServerProcess(tmp_path, lmdb=0).start() as server, _connected(server, "writing") as client:
        client.report_wrong([])
        client.report_wrong(KEYS)
        _store(client, keys)
        with pytest.raises(InvalidRequest, match="at most 256 blocks, not 300"):
            client.report_wrong(keys)
        assert_serves(client, keys)
        client.report_wrong(keys[:256])
        assert [client.lookup([key]).prefix_hits for key in keys] == [0] * 256 + [1] * 44
