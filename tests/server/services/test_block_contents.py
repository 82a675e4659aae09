"""DescribeBlocks, and stored events with the tokens of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness.payloads import key_of, namespace_of, payload
from harness.raw import RawSession, refusal_of
from harness.server_process import ServerProcess

from kvtier.client import Client, Group, InvalidRequest, Namespace
from kvtier.client.events import BlockContent, BlockFollower, describe_blocks
from kvtier.protos.v1 import common_pb2, events_pb2, events_pb2_grpc
from kvtier.protos.wire.block_contents import pack_tokens, unpack_contents

PART = 4 << 10
NAMESPACE = namespace_of(PART, PART)
KEYS = [key_of(number) for number in range(600)]
TOKENS = 16


def content(number: int, lora_name: str = "") -> BlockContent:
    tokens = pack_tokens(range(number * TOKENS, (number + 1) * TOKENS))
    return BlockContent(KEYS[number - 1] if number else None, tokens, lora_name)


CONTENTS = [content(number) for number in range(len(KEYS))]


def store(client: Client, keys: list[bytes]) -> None:
    client.store(keys, [payload(key, PART) for key in keys])


def replayed(session: RawSession, *, with_contents: bool) -> dict[bytes, BlockContent]:
    """Returns the contents in the events of a replay."""
    stub, follower = events_pb2_grpc.EventServiceStub(session.channel), BlockFollower()
    request = events_pb2.WatchEventsRequest(session=session.ref, with_contents=with_contents)
    stream, found = stub.WatchEvents(request, timeout=60), dict[bytes, BlockContent]()
    for response in stream:
        for change in follower.apply(response):
            assert set(change.contents) <= set(change.keys)
            found |= change.contents
        if response.phase == events_pb2.REPLAY_PHASE_END:
            stream.cancel()
            return found
    raise AssertionError("the stream has ended")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("c")).start() as server:
        yield server


@pytest.fixture
def session(server: ServerProcess) -> Iterator[RawSession]:
    with RawSession(server.endpoint, NAMESPACE, engine_id="e") as session:
        yield session


def test_events_have_the_tokens_on_request(server: ServerProcess, session: RawSession) -> None:
    """B6.9 Each block has tokens, parent and adapter. A reader that does not ask has none."""
    group_1 = [key_of(number, 1) for number in range(4)]
    with Client(server.endpoint, namespace=NAMESPACE) as client:
        client.wait_until_connected(60)
        assert describe_blocks(client, KEYS[:-1], CONTENTS[:-1])
        adapted = [BlockContent(None, pack_tokens(range(TOKENS)), "adapter")] * 4
        assert describe_blocks(client, group_1, adapted)
        store(client, [*KEYS, *group_1])
        expected = dict(zip(KEYS[:-1], CONTENTS[:-1], strict=True)) | dict(zip(group_1, adapted, strict=True))
        assert replayed(session, with_contents=True) == expected
        assert replayed(session, with_contents=False) == {}
        client.reset(wait=30)
        client.flush(KEYS)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"token_ids": bytes(63)}, "INVALID_ARGUMENT"),
        ({"token_ids": b""}, "INVALID_ARGUMENT"),
        ({"token_ids": bytes(2 * 32 * 4)}, "INVALID_ARGUMENT"),
        ({"parent_keys": common_pb2.PackedKeys(keys=bytes(20), key_bytes=20)}, "INVALID_ARGUMENT"),
        ({"parent_keys": common_pb2.PackedKeys(keys=bytes(40), key_bytes=40)}, "INVALID_ARGUMENT"),
        ({"keys": common_pb2.PackedKeys(keys=bytes(39) + b"\2", key_bytes=20)}, "INVALID_KEY"),
        ({"keys": common_pb2.PackedKeys(keys=b"k", key_bytes=0)}, "INVALID_KEY"),
    ],
)
def test_lengths_that_do_not_match_are_refused(session: RawSession, fields: dict[str, Any], reason: str) -> None:
    packed = common_pb2.PackedKeys(keys=KEYS[0] + KEYS[1], key_bytes=20)
    contents = {"token_ids": bytes(2 * TOKENS * 4), "parent_keys": packed} | fields
    keys = contents.pop("keys", packed)
    request = events_pb2.DescribeBlocksRequest(session=session.ref, keys=keys, contents=contents)
    with pytest.raises(grpc.RpcError) as refusal:
        events_pb2_grpc.EventServiceStub(session.channel).DescribeBlocks(request, timeout=60)
    assert refusal_of(refusal.value) == ("INVALID_ARGUMENT", reason)


def test_a_block_with_too_many_tokens_is_refused(server: ServerProcess) -> None:
    """Events of 256 such blocks would be too large for memory."""
    tokens = 16_385
    namespace = Namespace("large", "uint8", (Group(PART, tokens, "g"),), "bytes", "test")
    with RawSession(server.endpoint, namespace, engine_id="e") as session:
        contents = events_pb2.BlockContents(
            token_ids=bytes(4 * tokens),
            parent_keys=common_pb2.PackedKeys(keys=bytes(len(KEYS[0])), key_bytes=len(KEYS[0])),
        )
        with pytest.raises(grpc.RpcError) as refused:
            events_pb2_grpc.EventServiceStub(session.channel).DescribeBlocks(
                events_pb2.DescribeBlocksRequest(
                    session=session.ref,
                    keys=common_pb2.PackedKeys(keys=KEYS[0], key_bytes=len(KEYS[0])),
                    contents=contents,
                )
            )
        assert refusal_of(refused.value) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")


def test_a_client_checks_what_one_message_can_have(server: ServerProcess) -> None:
    with Client(server.endpoint, namespace=NAMESPACE) as client, pytest.raises(InvalidRequest, match="one length"):
        describe_blocks(client, KEYS[:1], [BlockContent(b"short", bytes(64))])
    with pytest.raises(ValueError, match="token_ids"):
        unpack_contents(
            events_pb2.BlockContents(token_ids=bytes(6), parent_keys=common_pb2.PackedKeys(keys=bytes(4), key_bytes=2)),
            2,
            2,
        )


def test_a_server_may_keep_no_tokens(tmp_path: Path) -> None:
    """B6.9 The answer says so, and events have no tokens."""
    with (
        ServerProcess(tmp_path, config="[events]\ntoken_memory = 0\n").start() as server,
        Client(server.endpoint, namespace=NAMESPACE) as client,
        RawSession(server.endpoint, NAMESPACE, engine_id="e") as session,
    ):
        client.wait_until_connected(60)
        assert not describe_blocks(client, KEYS[:2], CONTENTS[:2])
        store(client, KEYS[:2])
        assert replayed(session, with_contents=True) == {}
