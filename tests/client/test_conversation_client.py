"""Clients of ConversationService: arguments and failures; the server's tests have the rest."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvtier.client import (
    AsyncConversationClient,
    ConversationAction,
    ConversationClient,
    InvalidRequest,
    KVTierError,
    NotConnected,
)

RETAIN = ConversationAction.RETAIN


@pytest.mark.parametrize(
    ("action", "options"),
    [
        (99, {}),
        ("retain", {}),
        (RETAIN, {"conversation_id": 7}),
        (RETAIN, {"retain_for": -1}),
        (RETAIN, {"retain_for": float("nan")}),
        (RETAIN, {"keys": "text"}),
        (RETAIN, {"last_key": "text"}),
    ],
)
def test_invalid_arguments_are_refused_without_a_server(tmp_path: Path, action: Any, options: dict[str, Any]) -> None:
    with ConversationClient(f"unix:{tmp_path}/s") as agent, pytest.raises(InvalidRequest):
        agent.act(action, **options)


@pytest.mark.parametrize("options", [{"endpoint": "no address"}, {"endpoint": "unix:s", "timeout": "long"}])
def test_invalid_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        ConversationClient(**options)


def test_a_server_that_is_down_is_reported(tmp_path: Path) -> None:
    """By both clients, within the time-out."""
    endpoint = f"unix:{tmp_path}/s"
    with ConversationClient(endpoint, timeout=5) as agent:
        with pytest.raises(NotConnected):
            agent.act(RETAIN, "c", retain_for=1)
        with pytest.raises(KVTierError):
            agent.list()

    async def ask() -> None:
        async with AsyncConversationClient(endpoint, timeout=5) as other:
            with pytest.raises(NotConnected):
                await other.list()

    asyncio.run(ask())
