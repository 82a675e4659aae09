"""Parsing of `kv_transfer_params`: bad values count as absent."""

from __future__ import annotations

import pytest
from peers import PEER, Rig, answered, prefilled

from kvtier.client.handoff import RemoteRequest, TransferParams

NAMES = ("remote_engine_id", "remote_request_id", "remote_host")


def parsed(**said: object) -> TransferParams:
    """Parses the parameters of a prefill engine's request with these values."""
    params = TransferParams.parse(answered(80, **said))
    assert params is not None
    return params


def test_parameters_of_a_decode_engine_are_parsed() -> None:
    """B2.3: peer, number of tokens and expiry time."""
    expected = TransferParams(
        do_remote_decode=True, remote=PEER, has_blocks=True, num_tokens=80, expiry_time=1e9, holds_nothing=False
    )
    assert parsed(remote_blocks_expiry_time=1e9) == expected


@pytest.mark.parametrize(("said", "port"), [("7001", 7001), (7001.0, 7001), (0, 0), (65535, 65535)])
def test_a_port_may_come_as_text(said: object, port: int) -> None:
    """As in JSON and environment variables; 0 stands for a Unix socket."""
    assert parsed(remote_port=said).remote == RemoteRequest(PEER.engine_id, PEER.request_id, PEER.host, port)


@pytest.mark.parametrize(
    "said",
    [
        {"remote_port": -1},
        {"remote_port": 65536},
        {"remote_port": True},
        {"remote_port": "http"},
        {"remote_port": float("inf")},
        {"remote_port": 10**400},
        {"remote_host": ""},
        {"remote_engine_id": ""},
        {"remote_request_id": ""},
        {"remote_request_id": 5},
        *({key: text} for key in NAMES for text in ("a" * 513, "\ud800", "x\udfff", "\udc80y")),
    ],
)
def test_an_invalid_peer_counts_as_absent(said: dict[str, object]) -> None:
    """B2.5: an invalid value raises nothing."""
    assert parsed(**said).remote is None


@pytest.mark.parametrize("text", ["a" * 512, "\U0001f600" * 512, "\ud7ff\ue000"])
@pytest.mark.parametrize("key", NAMES)
def test_names_that_the_server_accepts(key: str, text: str) -> None:
    """B2.5: up to 512 characters of any script."""
    remote = parsed(**{key: text}).remote
    assert text in (remote.engine_id, remote.request_id, remote.host)


@pytest.mark.parametrize("said", [True, None, "soon", float("nan"), float("-inf"), 10**400, [1]])
def test_an_invalid_number_counts_as_absent(said: object) -> None:
    """B2.3 B2.19: the number of tokens is 0 then, and only the server knows the expiry."""
    params = parsed(remote_num_tokens=said, remote_blocks_expiry_time=said)
    assert (params.num_tokens, params.expiry_time) == (0, None)


@pytest.mark.parametrize(
    ("blocks", "nothing"),
    [([[]], True), ([[], []], True), ([[0], []], False), ([], False), (None, False), ("text", False), ([5], False)],
)
def test_a_peer_may_say_that_it_holds_nothing(blocks: object, nothing: bool) -> None:  # noqa: FBT001 - a table
    """B2.17: only if it lists every group without blocks; without a list it is asked."""
    assert parsed(remote_block_ids=blocks).holds_nothing is nothing
    rig = Rig(prefilled(remote_block_ids=blocks))
    assert rig.match() == (0 if nothing else None)
    assert len(rig.server.claims) == (not nothing)
