"""Messages of the server's publisher of events, decoded with vLLM's own types."""

from __future__ import annotations

import pytest
from msgspec.msgpack import Decoder
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.client import make_key
from kvtier.server.config.events import EventConfig
from kvtier.server.events.messages import MessageEncoder, PublishedEvent

HASHES = [bytes([number]) * 32 for number in range(3)]
KEYS = [make_key(each, group) for each, group in zip(HASHES, (0, 1, 0), strict=True)]


@pytest.mark.parametrize("kind", [BlockStored, BlockRemoved])
def test_vllm_decodes_a_message(kind: type[BlockStored | BlockRemoved]) -> None:
    """B6.8 The hashes are those that vLLM publishes for the same blocks."""
    is_stored = kind is BlockStored
    payload = MessageEncoder(EventConfig()).encode(PublishedEvent(is_stored, "CPU", KEYS), [16, 32], lambda _: None)
    batch = Decoder(type=KVEventBatch).decode(payload or b"")
    found = {}
    for event in batch.events:
        assert isinstance(event, kind)
        assert event.medium == "CPU"
        if isinstance(event, BlockStored):
            assert event.block_size == (16, 32)[event.group_idx or 0]
        found |= dict.fromkeys(event.block_hashes, event.group_idx)
    numbers = [maybe_convert_block_hash(BlockHash(each)) for each in HASHES]
    assert found == dict(zip(numbers, (0, 1, 0), strict=True))
