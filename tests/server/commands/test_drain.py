"""An orderly shutdown keeps all blocks that fit into a tier."""

from pathlib import Path

import pytest
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, KVTierError, StoreStatus


def test_a_hanging_writer_does_not_prevent_the_flush(tmp_path: Path) -> None:
    """The server waits for it briefly; complete blocks become durable meanwhile."""
    namespace = namespace_of(MIB)
    keys = [key_of(number) for number in range(40)]
    with ServerProcess(tmp_path, region=64 * MIB, lmdb=256 * MIB).start() as server:
        with Client(server.endpoint, namespace=namespace) as client:
            client.store(keys, [payload(key, MIB) for key in keys])
            with pytest.raises(KVTierError), client.write([key_of(1000)]):
                assert server.terminate() == 0
        server.start()
        with Client(server.endpoint, namespace=namespace) as client:
            assert_serves(client, keys)
            assert client.lookup([key_of(1000)]).id == 0


def test_sigterm_flushes_blocks_that_missed_their_cascade(tmp_path: Path) -> None:
    """Cascades that were dropped because the queue was full are repeated before the server ends."""
    namespace = namespace_of(MIB)
    keys = [key_of(number) for number in range(48)]
    with ServerProcess(tmp_path, region=64 * MIB, lmdb=256 * MIB).start() as server:
        with Client(server.endpoint, namespace=namespace) as client:
            statuses = client.store(keys, [payload(key, MIB) for key in keys])
            assert set(statuses) == {StoreStatus.GRANTED}
            assert server.terminate() == 0
        server.start()
        with Client(server.endpoint, namespace=namespace) as client:
            assert_serves(client, keys)
