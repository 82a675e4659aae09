"""Conversations over the wire: engines name them, agents act on them, operators list them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from harness.auth_site import Site, make_site
from harness.command_line import json_output, kvtier
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.raw import refusal_of
from harness.server_process import MIB, ServerProcess

from kvtier.client import (
    AccessDenied,
    AsyncConversationClient,
    Client,
    ConversationAction,
    ConversationClient,
    ConversationInfo,
    ConversationResult,
    InvalidRequest,
    KeyStatus,
    LimitExceeded,
    TierFilter,
)
from kvtier.protos.v1 import conversation_pb2, conversation_pb2_grpc
from kvtier.protos.wire.packed_keys import pack_keys

PART = 64 << 10
ACT = ConversationAction
ONLY_CPU = TierFilter(names=frozenset(["lmdb"]))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yields a server whose CPU tier has room for 128 blocks. Its disk tier has room for all."""
    with ServerProcess(tmp_path_factory.mktemp("s"), region=8 * MIB).start() as server:
        yield server


@pytest.fixture(params=["auto", "grpc"])
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Client]:
    """Yields a client that calls over a socket of its own, or over gRPC. Its blocks are new."""
    namespace = namespace_of(PART, model=request.node.name)
    with Client(server.endpoint, namespace=namespace, transport=request.param) as client:
        client.wait_until_connected(60)
        yield client
        client.reset(wait=60)  # the next test has an empty CPU tier


@pytest.fixture
def agent(server: ServerProcess) -> Iterator[ConversationClient]:
    """Yields an agent. Afterwards no conversation is left."""
    with ConversationClient(server.endpoint, timeout=60) as agent:
        yield agent
        for each in agent.list().conversations:
            agent.act(ACT.UNPIN, each.conversation_id)
            agent.act(ACT.DELETE, each.conversation_id)


def keys_of(first: int, count: int = 8) -> list[bytes]:
    return [key_of(number) for number in range(first, first + count)]


def turn(client: Client, name: str, keys: list[bytes]) -> int:
    """Runs a request: looks up its keys, and stores the missing ones. Returns the hits."""
    with client.begin_request("r", keys, conversation_id=name, wait=30) as lease:
        hits = lease.prefix_hits
    client.store(keys[hits:], [payload(key, PART) for key in keys[hits:]], request_id="r")
    client.finish_request("r")
    client.flush(keys, wait=60)
    return hits


def in_cpu(client: Client, keys: list[bytes]) -> int:
    """Returns how many blocks the CPU tier has."""
    with client.lookup(keys, prefix=False, exclude=ONLY_CPU) as lease:
        return lease.statuses.count(KeyStatus.HIT)


def flood(client: Client) -> None:
    """Stores twice as many other blocks as the CPU tier has room for."""
    for start in range(1000, 1256, 32):
        keys = keys_of(start, 32)
        client.store(keys, [payload(key, PART) for key in keys])
        client.flush(keys, wait=60)


def info(agent: ConversationClient, name: str) -> ConversationInfo:
    [found] = agent.list(name).conversations
    return found


def test_retained_blocks_survive_a_flood(client: Client, agent: ConversationClient) -> None:
    """Until the release. Without retention the flood evicts them from the CPU tier."""
    turn(client, "kept", keys_of(0))
    turn(client, "lost", keys_of(100))
    assert agent.act(ACT.RETAIN, "kept", retain_for=600) == ConversationResult(8, 0, 0, 0)
    flood(client)
    assert (in_cpu(client, keys_of(0)), in_cpu(client, keys_of(100))) == (8, 0)
    found = info(agent, "kept")
    assert found.retained_seconds is not None
    assert 500 < found.retained_seconds <= 600
    assert [(tier.tier, tier.blocks, tier.retained) for tier in found.tiers] == [("cpu", 8, 8), ("lmdb", 8, 8)]
    assert agent.act(ACT.RELEASE, "kept").changed == 8
    assert info(agent, "kept").retained_seconds is None


def test_a_prefetch_loads_the_latest_request(client: Client, agent: ConversationClient) -> None:
    """Into the CPU tier, before the next request comes."""
    turn(client, "c", keys_of(0))
    flood(client)
    assert in_cpu(client, keys_of(0)) == 0
    assert agent.act(ACT.PREFETCH, "c", retain_for=60).changed == 8
    wait_until(lambda: in_cpu(client, keys_of(0)) == 8)
    assert agent.act(ACT.PREFETCH, "c", retain_for=60).kept == 8
    assert client.status().sessions[0].tenant == "", "the session of the prefetch has ended"


def test_demoted_blocks_leave_the_cpu_tier_first(client: Client, agent: ConversationClient) -> None:
    """The disk tier keeps them."""
    turn(client, "c", keys_of(0, 16))
    assert agent.act(ACT.DEMOTE, "c").changed == 16
    flood(client)
    assert in_cpu(client, keys_of(0, 16)) == 0
    assert info(agent, "c").tiers[1].blocks == 16


def test_deleted_blocks_are_in_no_tier(client: Client, agent: ConversationClient) -> None:
    """Blocks that another conversation uses stay."""
    turn(client, "a", keys_of(0))
    turn(client, "b", keys_of(4))
    assert agent.act(ACT.DELETE, "a") == ConversationResult(4, 4, 0, 0)
    with client.lookup(keys_of(0, 12), prefix=False, wait=30) as lease:
        assert lease.statuses == bytes([KeyStatus.MISS] * 4 + [KeyStatus.HIT] * 8)
    with pytest.raises(InvalidRequest) as error:
        agent.act(ACT.RETAIN, "a", retain_for=60)
    assert error.value.reason == "CONVERSATION_NOT_FOUND"


def test_too_much_retention_is_refused(client: Client, agent: ConversationClient) -> None:
    """At most half of the CPU tier; a refused call changes nothing."""
    turn(client, "large", keys_of(0, 80))
    with pytest.raises(LimitExceeded) as error:
        agent.act(ACT.RETAIN, "large", retain_for=60)
    assert error.value.reason == "RETENTION_FULL"
    assert sum(tier.retained for tier in info(agent, "large").tiers) == 0


def test_a_prompt_is_named_by_the_key_of_its_last_block(client: Client, agent: ConversationClient) -> None:
    """An explicit list of keys needs the namespace."""
    turn(client, "c", keys_of(0, 8))
    namespace = info(agent, "c").namespace_id
    assert agent.act(ACT.RETAIN, last_key=key_of(4), retain_for=60).changed == 5
    assert info(agent, "c").tiers[0].retained == 5
    some = [*keys_of(3, 3), key_of(900)]
    assert agent.act(ACT.RELEASE, namespace_id=namespace, keys=some) == ConversationResult(3, 0, 0, 1)
    assert agent.act(ACT.PREFETCH, last_key=key_of(4)).kept == 5
    assert agent.act(ACT.DELETE, last_key=key_of(1)).changed == 2
    assert in_cpu(client, keys_of(0)) == 6


def test_pinned_blocks_stay_until_they_are_unpinned(client: Client, agent: ConversationClient) -> None:
    turn(client, "c", keys_of(0))
    assert agent.act(ACT.PIN, "c").changed == 8
    assert agent.act(ACT.DELETE, "c").kept == agent.act(ACT.DEMOTE, "c").kept == 8
    flood(client)
    assert in_cpu(client, keys_of(0)) == 8
    assert info(agent, "c").pinned
    assert agent.act(ACT.UNPIN, "c").changed == 8
    assert not info(agent, "c").pinned


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"action": "RETAIN", "conversation_id": "none", "retain_for": {"seconds": 1}}, "CONVERSATION_NOT_FOUND"),
        ({"action": "DELETE", "last_key": b"x" * 20}, "CONVERSATION_NOT_FOUND"),
        ({"action": "RETAIN", "conversation_id": "none"}, "INVALID_ARGUMENT"),
        ({"action": "RETAIN", "conversation_id": "none", "retain_for": {"seconds": -1}}, "INVALID_ARGUMENT"),
        ({"action": "UNSPECIFIED", "conversation_id": "none"}, "INVALID_ARGUMENT"),
        ({"action": "DELETE"}, "INVALID_ARGUMENT"),
        ({"action": "DELETE", "conversation_id": "c", "last_key": b"x" * 20}, "INVALID_ARGUMENT"),
        ({"action": "DELETE", "keys": pack_keys([b"x" * 20])}, "INVALID_ARGUMENT"),
        ({"action": "DELETE", "keys": pack_keys([b"x" * 20]), "namespace_id": b"n" * 32}, "INVALID_ARGUMENT"),
        ({"action": "DELETE", "keys": pack_keys([b"x" * 2000]), "namespace_id": b"n" * 32}, "INVALID_KEY"),
        ({"action": "DELETE", "conversation_id": "c" * 600}, "INVALID_ARGUMENT"),
    ],
)
def test_invalid_requests_are_refused(server: ServerProcess, request_: dict[str, object], reason: str) -> None:
    fields = request_ | {"action": f"CONVERSATION_ACTION_{request_['action']}"}
    with grpc.insecure_channel(server.endpoint) as channel, pytest.raises(grpc.RpcError) as refusal:
        conversation_pb2_grpc.ConversationServiceStub(channel).ActOnConversation(
            conversation_pb2.ActOnConversationRequest(**fields), timeout=60
        )
    assert refusal_of(refusal.value)[1] == reason


def test_a_page_lists_the_newest_first(client: Client, agent: ConversationClient, server: ServerProcess) -> None:
    """Also with the client for asyncio."""
    for number in range(5):
        turn(client, f"c{number}", keys_of(number, 2))
    first = agent.list(most=3)
    assert ([each.conversation_id for each in first.conversations], first.total) == (["c4", "c3", "c2"], 5)

    async def rest() -> list[str]:
        async with AsyncConversationClient(server.endpoint, timeout=60) as other:
            page = await other.list(page=first.next_page)
            assert page.next_page == 0
            assert (await other.act(ACT.RELEASE, "c0")).changed == 2
            with pytest.raises(InvalidRequest):
                await other.act(ACT.RELEASE, "none")
            return [each.conversation_id for each in page.conversations]

    assert asyncio.run(rest()) == ["c1", "c0"]


def test_the_command_lists_and_acts(client: Client, server: ServerProcess) -> None:
    turn(client, "c", keys_of(0))
    turn(client, "c", keys_of(0, 10))

    def run(*words: str, code: int = 0) -> str:
        done = kvtier("conversations", *words, "--endpoint", server.endpoint, code=code)
        return done.stdout + done.stderr

    assert "10 blocks changed" in run("retain", "c", "--for", "10m")
    [listed] = json_output("conversations", "list", "--endpoint", server.endpoint)["conversations"]
    assert (listed["conversation_id"], listed["requests"], listed["blocks"]) == ("c", 2, 10)
    assert listed["tiers"][0] == {"tier": "cpu", "blocks": 10, "bytes": 10 * PART, "retained_blocks": 10}
    assert "cpu: 10" in run("show", "c")
    namespace = listed["namespace_id"]
    assert "2 blocks changed" in run(
        "release", "--block", key_of(0).hex(), "--block", key_of(1).hex(), "--namespace", namespace
    )
    assert "5 blocks changed" in run("demote", "--prompt", key_of(4).hex())
    assert "10 kept" in run("prefetch", "c")
    assert "10 blocks changed" in run("pin", "c")
    assert "pinned" in run("list")
    assert "10 kept" in run("delete", "c")
    assert "10 blocks changed" in run("unpin", "c")
    assert "10 blocks changed" in run("delete", "c")
    assert "no conversations" in run("list")
    assert "there is no record of the conversation 'c'" in run("release", "c", code=1)
    for wrong in (
        ["retain", "c"],
        ["release"],
        ["list", "c"],
        ["release", "--prompt", "xyz"],
        ["show", "--prompt", "00"],
    ):
        assert "Traceback" not in run(*wrong, code=2)


def test_a_restart_forgets_conversations_and_keeps_blocks(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path).start() as server,
        Client(server.endpoint, namespace=namespace_of(PART)) as client,
    ):
        client.wait_until_connected(60)
        turn(client, "c", keys_of(0))
    with (
        ServerProcess(tmp_path).start() as server,
        Client(server.endpoint, namespace=namespace_of(PART)) as client,
    ):
        client.wait_until_connected(60)
        with ConversationClient(server.endpoint, timeout=60) as agent:
            assert agent.list().total == 0
        with client.lookup(keys_of(0), wait=30) as lease:
            assert lease.prefix_hits == 8


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = make_site(tmp_path_factory.mktemp("t"))
    with made.server.start():
        yield made


def test_tenants_see_only_their_conversations(site: Site) -> None:
    """An admin sees and changes all. Readers only list, and engines do not pin."""
    with site.client("acme-engine") as acme:
        acme.wait_until_connected(60)
        keys = [key_of(number) for number in range(2)]
        with acme.begin_request("r", keys, conversation_id="c"):
            pass

    def act(name: str, tenant: str | None = None, action: ConversationAction = ACT.RELEASE) -> ConversationResult:
        with ConversationClient(
            site.server.tcp, tenant=tenant, timeout=60, credentials=site.credentials(name)
        ) as agent:
            return agent.act(action, "c")

    def listed(name: str, tenant: str | None = None) -> list[str]:
        with ConversationClient(
            site.server.tcp, tenant=tenant, timeout=60, credentials=site.credentials(name)
        ) as agent:
            return [each.tenant for each in agent.list().conversations]

    assert act("acme-engine") == act("acme-engine", "acme") == act("boss", "acme") == ConversationResult(0, 0, 0, 2)
    assert listed("acme-reader") == listed("boss") == listed("boss", "acme") == ["acme"]
    assert listed("zeta-engine") == listed("boss", "zeta") == []
    for name, tenant, action, reason in (
        ("zeta-engine", None, ACT.RELEASE, "CONVERSATION_NOT_FOUND"),
        ("zeta-engine", "acme", ACT.RELEASE, "WRONG_TENANT"),
        ("acme-reader", None, ACT.RELEASE, "PERMISSION_DENIED"),
        ("acme-engine", None, ACT.PIN, "PERMISSION_DENIED"),
        ("acme-engine", None, ACT.UNPIN, "PERMISSION_DENIED"),
    ):
        with pytest.raises((AccessDenied, InvalidRequest)) as error:
            act(name, tenant, action)
        assert error.value.reason == reason, (name, tenant, action)
    with pytest.raises(AccessDenied):
        listed("zeta-engine", "acme")
    assert act("boss", "acme", ACT.PIN).missing == act("boss", "acme", ACT.UNPIN).missing == 2
