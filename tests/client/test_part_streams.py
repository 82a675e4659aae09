"""Receiver of block parts: which parts the next stream of a Pull requests."""

from __future__ import annotations

import ctypes

import xxhash

from kvtier.client.part_streams import PartReceiver
from kvtier.protos.v1 import transfer_pb2


def test_a_part_that_arrived_in_part_is_requested_again() -> None:
    """Complete parts are not: the second stream sends bytes 4 to 7 again, at offset 0."""
    memory = (ctypes.c_char * 12)()
    start = ctypes.addressof(memory)
    receiver = PartReceiver([start, start + 4, start + 8], [4, 4, 4])

    def take(offset: int, payload: bytes) -> None:
        checksum = xxhash.xxh3_64_intdigest(payload)
        receiver.take(transfer_pb2.PullResponse(offset_bytes=offset, payload=payload, xxh3_64=checksum))

    take(0, b"aaaabb")
    take(8, b"cccc")
    receiver.end_stream()
    assert receiver.missing == [1]
    take(0, b"bbbb")
    receiver.end_stream()
    assert receiver.missing == []
    assert memory.raw == b"aaaabbbbcccc"
