"""Server and client on two hosts: over any link, blocks arrive whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.lossy_network import LossyNetwork, unavailable_reason
from harness.server_process import MIB, ServerProcess

PORT = 7123
SECONDS = 90.0

# Runs on the second host: stores and loads; prints when a load has begun, and its outcome.
_CLIENT = """
import sys
sys.path.insert(0, sys.argv[1])
from harness.bulk import wait_for_bulk
from harness.long_timeouts import long_timeouts
from harness.payloads import filled, is_payload, key_of, namespace_of, payload
from kvtier.client import Client, KVTierError, part_streams
MIB = 1 << 20
keys = [key_of(number, salt=sys.argv[3]) for number in range(16)]
taken = []
original = part_streams.PartReceiver.verify
def verify(sink, head, checksum):
    original(sink, head, checksum)
    taken.append(head.offset)
    if len(taken) == 4:
        print("loading now", flush=True)
part_streams.PartReceiver.verify = verify
with long_timeouts(), Client(sys.argv[2], namespace=namespace_of(MIB), name="far", transport="tcp") as client:
    wait_for_bulk(client)
    try:
        statuses = client.store(keys, [payload(key, MIB) for key in keys])
        print("stored", statuses.count(1))
        buffers = filled(len(keys), MIB)
        hits = client.load(keys, buffers)
    except KVTierError as error:
        print("miss", type(error).__name__, error)
    else:
        print("loaded", hits, all(map(is_payload, keys[:hits], buffers)))
"""


@pytest.fixture(scope="module")
def link() -> Iterator[LossyNetwork]:
    """Yields a link between two hosts; skips if this process may not make network namespaces."""
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    link = LossyNetwork("10.231.77")
    yield link
    link.close()


@pytest.fixture(scope="module")
def server(link: LossyNetwork, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yields a server on the first host; its Unix socket serves this process."""
    directory: Path = tmp_path_factory.mktemp("far")
    process = ServerProcess(directory, region=128 * MIB, lmdb=16 * MIB, prefix=("ip", "netns", "exec", link.spaces[0]))
    config = directory / "kvtier.toml"
    listen = f'insecure = true\nlisten = ["{link.addresses[0]}:{PORT}", '
    config.write_text(config.read_text().replace("listen = [", listen))
    with process:
        yield process.start()


def far_client(link: LossyNetwork, salt: str, *, down: float = 0.0) -> dict[str, str]:
    """Runs the client on the second host, with the link down during a load; returns its output."""
    tests = str(Path(__file__).parents[2])
    command = ["ip", "netns", "exec", link.spaces[1], sys.executable, "-c", _CLIENT]
    arguments = [tests, f"{link.addresses[0]}:{PORT}", salt]
    said = {}
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            what, _, rest = line.strip().partition(" ")
            said[what] = rest
            if what == "loading":
                link.down(down)
        assert process.wait(SECONDS) == 0
    return said


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("delay", "loss"), [(0.0, 0.0), (0.005, 0.0), (0.005, 0.01)])
def test_blocks_arrive_whole_over_a_slow_link(
    link: LossyNetwork, server: ServerProcess, delay: float, loss: float
) -> None:
    """The link delays packets by 5 ms each way, and in one case loses one in a hundred."""
    link.delay, link.loss = delay, loss
    said = far_client(link, f"{delay} {loss}")
    assert (said["stored"], said["loaded"]) == ("16", "16 True")
    assert server.alive


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_link_outage_costs_time_or_a_miss(link: LossyNetwork, server: ServerProcess) -> None:
    """The link is down for two seconds during a load; the server continues (B4)."""
    link.delay, link.loss = 0.005, 0.0
    said = far_client(link, "down", down=2.0)
    assert "loading" in said
    assert said.get("loaded") == "16 True" or "miss" in said, said
    link.delay = 0.0
    assert far_client(link, "up again")["loaded"] == "16 True"
    server.wait_for(lambda status: not (status.leases or status.stores or status.quarantined_bytes), 30)
