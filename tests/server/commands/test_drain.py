"""An orderly end loses nothing that fits."""

from pathlib import Path

import pytest
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, KVTierError, StoreStatus


def test_a_writer_that_hangs_does_not_keep_the_others_from_being_flushed(tmp_path: Path) -> None:
    """It gets a moment; what is complete is made durable meanwhile."""
    namespace = namespace_of(MIB)
    keys = [key_of(number) for number in range(40)]
    with ServerProcess(tmp_path, region=64 * MIB, lmdb=256 * MIB).start() as server:
        with Client(server.endpoint, namespace=namespace) as client:
            client.wait_until_connected(60)
            client.store(keys, [payload(key, MIB) for key in keys])
            with pytest.raises(KVTierError), client.write([key_of(1000)]):
                assert server.terminate() == 0
        server.start()
        with Client(server.endpoint, namespace=namespace) as client:
            client.wait_until_connected(60)
            assert_serves(client, keys)
            assert client.lookup([key_of(1000)]).id == 0


def test_sigterm_flushes_what_was_left_out_under_load(tmp_path: Path) -> None:
    """Cascades that were dropped because the queue was full are made up for before the server ends."""
    namespace = namespace_of(MIB)
    keys = [key_of(number) for number in range(48)]
    with ServerProcess(tmp_path, region=64 * MIB, lmdb=256 * MIB).start() as server:
        with Client(server.endpoint, namespace=namespace) as client:
            client.wait_until_connected()
            statuses = client.store(keys, [payload(key, MIB) for key in keys])
            assert set(statuses) == {StoreStatus.GRANTED}
            assert server.terminate() == 0
        server.start()
        with Client(server.endpoint, namespace=namespace) as client:
            client.wait_until_connected()
            assert_serves(client, keys)
