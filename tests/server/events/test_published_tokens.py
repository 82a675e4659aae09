"""Messages of the publisher with the tokens of blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from harness.indexer import TOPIC, Indexer, engine, hash_of, publishing
from harness.payloads import key_of, namespace_of, payload
from msgspec.msgpack import decode

from kvtier.client import Client
from kvtier.client.events import BlockContent, describe_blocks
from kvtier.protos.wire.block_contents import pack_tokens
from kvtier.server.config.events import EventConfig
from kvtier.server.events import topic as topic_module
from kvtier.server.events.messages import MessageEncoder, PublishedEvent
from kvtier.server.events.topic import Topic

PART = 64 << 10
NAMESPACE = namespace_of(PART, PART)
KEYS = [key_of(number) for number in range(6)]
TOKENS = [list(range(number * 16, (number + 1) * 16)) for number in range(6)]
CONTENTS = [
    BlockContent(KEYS[number - 1] if number else None, pack_tokens(tokens)) for number, tokens in enumerate(TOKENS)
]
KNOWN = dict(zip(KEYS, CONTENTS, strict=True))


def events_of(keys: list[bytes], known: Any, form: str = "map") -> list[Any]:
    encoder = MessageEncoder(EventConfig(format=form))  # type: ignore[arg-type]
    body = encoder.encode(PublishedEvent(True, "CPU", keys), [16, 16], known.get)
    assert body is not None
    _, events, _ = decode(body)
    return list(events)


def test_consecutive_blocks_are_one_event() -> None:
    """B6.9 A gap, another adapter and a block without tokens begin an event of their own."""
    (event,) = events_of(KEYS, KNOWN)
    assert event["block_hashes"] == [hash_of(key) for key in KEYS]
    assert (event["parent_block_hash"], event["token_ids"]) == (None, list(range(96)))
    unknown = key_of(99)
    found = events_of([KEYS[1], KEYS[2], unknown, KEYS[3], KEYS[5]], KNOWN)
    assert [(len(event["block_hashes"]), event["parent_block_hash"]) for event in found] == [
        (2, hash_of(KEYS[0])),
        (1, None),
        (1, hash_of(KEYS[2])),
        (1, hash_of(KEYS[4])),
    ]
    assert found[1]["token_ids"] == []
    adapted = KNOWN | {KEYS[1]: CONTENTS[1]._replace(lora_name="adapter")}
    assert [event["lora_name"] for event in events_of(KEYS[:2], adapted)] == [None, "adapter"]
    assert events_of(KEYS[:2], KNOWN, "array") == [
        ["BlockStored", [hash_of(key) for key in KEYS[:2]], None, TOKENS[0] + TOKENS[1], 16, None, "CPU", None, None, 0]
    ]


def taken_of(keys: list[bytes], known: Any) -> list[bytes]:
    """Returns the keys in the order in which a topic publishes them."""
    topic = Topic([16], known)
    topic.change(PublishedEvent(True, "CPU", keys))
    return [key for event in iter(topic.take, []) for change in event for key in change.keys]


@pytest.mark.parametrize("batch", [1, 3, 256])
@pytest.mark.parametrize("seed", range(5))
def test_parents_come_first(seed: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """B6.9 In any order of the keys. A cycle, which an engine may describe, does no harm."""
    monkeypatch.setattr(topic_module, "_BATCH_KEYS", batch)
    keys = list(KEYS)
    random.Random(seed).shuffle(keys)
    assert taken_of(keys, KNOWN.get) == KEYS
    cycle = KNOWN | {KEYS[0]: CONTENTS[0]._replace(parent_key=KEYS[5])}
    assert sorted(taken_of(keys, cycle.get)) == sorted(KEYS)
    assert taken_of(keys, lambda _: None) == keys


def tokens_of(indexer: Indexer) -> dict[Any, list[int]]:
    """Returns the tokens per block. Asserts that each block comes after its parent."""
    found: dict[Any, list[int]] = {}
    for event in indexer.stored[TOPIC]:
        assert event.parent_block_hash is None or event.parent_block_hash in found
        for number, block_hash in enumerate(event.block_hashes):
            found[block_hash] = event.token_ids[number * 16 : (number + 1) * 16]
    return found


def test_a_topic_has_the_tokens_of_what_is_held(tmp_path: Path) -> None:
    """B6.9 Also of blocks that are only on disk; a restart has lost the tokens."""
    with publishing(tmp_path) as (server, context):
        with Client(server.endpoint, namespace=NAMESPACE) as client:
            client.wait_until_connected(60)
            describe_blocks(client, KEYS[:4], CONTENTS[:4])
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            client.flush(KEYS)
            client.reset(wait=30)
            indexer = Indexer(context, tmp_path)
            with engine(server, NAMESPACE):
                indexer.read_until(lambda: len(indexer.known.get(TOPIC, ())) == len(KEYS))
                expected = [*TOKENS[:4], [], []]
                assert tokens_of(indexer) == dict(zip(map(hash_of, KEYS), expected, strict=True))
        server.kill()
        server.start()
        after = Indexer(context, tmp_path)
        with engine(server, NAMESPACE):
            after.read_until(lambda: len(after.known.get(TOPIC, ())) == len(KEYS))
            assert tokens_of(after) == {hash_of(key): [] for key in KEYS}
