"""An orderly end loses nothing that fits."""

from pathlib import Path

from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, StoreStatus


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
