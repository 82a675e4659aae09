"""`python round_trip.py [ENDPOINT]`: stores, flushes and reads blocks over each transport.

Prints JSON. It checks servers installed by a service manager, from a wheel or from an image.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from kvtier.client import Client, DurableStatus, Group, Namespace, Timeouts, make_key

PART_BYTES = 64 << 10
COUNT = 8
TIMEOUTS = Timeouts(connect=60, call=60)


def main() -> int:
    """Returns 0 if all blocks are durable and read back bit by bit, with and without shm."""
    endpoint = sys.argv[1] if len(sys.argv) > 1 else "unix:/run/kvtier/kvtier.sock"
    namespace = Namespace("round-trip", "uint8", (Group(PART_BYTES, 16, "group"),), "bytes", "test", world_size=1)
    keys = [make_key(number.to_bytes(16, "big"), 0) for number in range(COUNT)]
    blocks = [np.full(PART_BYTES, number + 1, np.uint8) for number in range(COUNT)]
    report: dict[str, object] = {}
    for transport in ("shm", "grpc"):
        with Client(endpoint, namespace=namespace, transport=transport, timeouts=TIMEOUTS) as client:
            client.wait_until_connected(60)
            if transport == "shm":
                client.store(keys, blocks)
                report["durable"] = set(client.flush(keys, wait=30)) == {DurableStatus.DURABLE}
            found = [np.zeros(PART_BYTES, np.uint8) for _ in keys]
            hits = client.load(keys, found, wait=30)
            same = all(np.array_equal(one, other) for one, other in zip(found, blocks, strict=True))
            report[transport] = (
                "sound" if (hits, same, client.transport) == (COUNT, True, transport) else f"{hits} hits"
            )
    print(json.dumps(report, sort_keys=True))
    return 0 if report == {"durable": True, "grpc": "sound", "shm": "sound"} else 1


if __name__ == "__main__":
    sys.exit(main())
