"""Contract of the clients of conversations: tested with the real server and with the fake."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from contracts.cache_client import NAMESPACE, SMALL, new_keys

from kvtier.client import ConversationAction, ConversationClient, ConversationResult, InvalidRequest, KeyStatus


class ConversationClientContract:
    """Subclasses provide two fixtures.

    `connect`: (namespace) -> client of an engine. `agent`: a client of the conversations.
    """

    @pytest.fixture
    def client(self, connect: Callable[..., Any]) -> Any:
        return connect(NAMESPACE)

    def test_agents_retain_the_blocks_of_a_conversation(self, client: Any, agent: ConversationClient) -> None:
        """Those that a request has looked up and stored. The status of the conversation says so."""
        name, keys = _turn(client, 4)
        assert agent.act(ConversationAction.RETAIN, name, retain_for=600) == ConversationResult(4, 0, 0, 0)
        [found] = agent.list(name).conversations
        assert (found.conversation_id, found.tenant, found.requests, found.blocks) == (name, "", 1, 4)
        assert (found.tiers[0].tier, found.tiers[0].blocks, found.tiers[0].retained) == ("cpu", 4, 4)
        assert found.tiers[0].nbytes >= 4 * SMALL
        assert found.retained_seconds is not None
        assert 500 < found.retained_seconds <= 600
        _, keys = _turn(client, 6, name, keys)
        [found] = agent.list(name).conversations
        assert (found.requests, found.blocks, found.tiers[0].retained) == (2, 6, 6)
        assert agent.act(ConversationAction.PREFETCH, name) == ConversationResult(0, 0, 6, 0)
        assert agent.act(ConversationAction.RELEASE, name).changed == 6
        assert agent.list(name).conversations[0].retained_seconds is None
        assert agent.act(ConversationAction.DEMOTE, name).changed == 6

    def test_agents_delete_what_no_other_conversation_uses(self, client: Any, agent: ConversationClient) -> None:
        """Pinned blocks stay until they are unpinned. A deleted conversation is unknown."""
        name, keys = _turn(client, 4)
        other, more = _turn(client, 6, known=keys[:2])
        assert agent.act(ConversationAction.PIN, name).changed == 4
        assert agent.list(name).conversations[0].pinned
        assert agent.act(ConversationAction.DELETE, name).kept == 4
        assert agent.act(ConversationAction.UNPIN, name).changed == 4
        assert agent.act(ConversationAction.DELETE, name) == ConversationResult(2, 2, 0, 0)
        with client.lookup([*keys, *more[2:]], prefix=False) as lease:
            assert [status == KeyStatus.HIT for status in lease.statuses] == [True] * 2 + [False] * 2 + [True] * 4
        with pytest.raises(InvalidRequest) as error:
            agent.act(ConversationAction.RELEASE, name)
        assert error.value.reason == "CONVERSATION_NOT_FOUND"
        assert agent.act(ConversationAction.DELETE, other).changed == 6
        assert agent.list(other).total == 0

    def test_agents_name_a_prompt_or_a_list_of_keys(self, client: Any, agent: ConversationClient) -> None:
        name, keys = _turn(client, 6)
        namespace = agent.list(name).conversations[0].namespace_id
        assert agent.act(ConversationAction.RETAIN, last_key=keys[3], retain_for=600).changed == 4
        assert agent.list(name).conversations[0].tiers[0].retained == 4
        some = [*keys[2:4], *new_keys(1)]
        answer = agent.act(ConversationAction.RELEASE, namespace_id=namespace, keys=some)
        assert answer == ConversationResult(2, 0, 0, 1)
        assert agent.list(name).conversations[0].tiers[0].retained == 2
        wrong: list[dict[str, Any]] = [{}, {"keys": keys}, {"last_key": keys[0], "keys": keys}]
        for arguments in wrong:
            with pytest.raises(InvalidRequest):
                agent.act(ConversationAction.DELETE, **arguments)
        with pytest.raises(InvalidRequest):
            agent.act(ConversationAction.RETAIN, name)

    def test_conversations_are_listed_newest_first(self, client: Any, agent: ConversationClient) -> None:
        """In pages of the requested size."""
        names = [_turn(client, 1)[0] for _ in range(3)]
        first = agent.list(most=2)
        assert [each.conversation_id for each in first.conversations] == [names[2], names[1]]
        assert agent.list(page=first.next_page, most=1).conversations[0].conversation_id == names[0]


def _turn(client: Any, count: int, name: str = "", known: Sequence[bytes] = ()) -> tuple[str, list[bytes]]:
    """Runs a request with `count` blocks, those of `known` first.

    Returns its conversation and its keys.
    """
    name, request = name or os.urandom(8).hex(), os.urandom(8).hex()
    keys = [*known, *new_keys(count - len(known))]
    with client.begin_request(request, keys, conversation_id=name) as lease:
        hits = lease.prefix_hits
    assert hits == len(known)
    client.store(keys[hits:], [os.urandom(SMALL) for _ in keys[hits:]], request_id=request)
    client.finish_request(request)
    client.flush(keys, wait=60)
    return name, keys
