"""`kv_transfer_params` that the proxy sends to engines."""

from __future__ import annotations

from typing import Any

import pytest
from disagg_proxy.transfer import Address, EngineIdentity, first_turn, hold_only, is_usable, next_turn

from kvtier.client.handoff import TransferParams

HELD = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[0, 1]],
    "remote_engine_id": "d0",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 7070,
    "tp_size": 2,
    "remote_num_tokens": 23,
    "remote_blocks_expiry_time": 2e9,
}


def test_the_first_turn_has_no_remote() -> None:
    """B2.24 On a miss P gets `do_remote_decode` True, and all remote fields None."""
    params = first_turn()
    assert params["do_remote_decode"] is True
    assert not params["do_remote_prefill"]
    remote = {name: value for name, value in params.items() if name.startswith("remote_")}
    assert remote.keys() == {name for name in HELD if name.startswith("remote_")}
    assert set(remote.values()) == {None}


def test_the_next_turn_names_what_d_holds() -> None:
    """P gets D's fields unchanged, and is told to hold its blocks for D (B1.1, B2.3)."""
    params = next_turn({**HELD, "do_remote_prefill": True, "do_remote_decode": False})
    assert params == {**HELD, "do_remote_prefill": False, "do_remote_decode": True}


def test_engines_understand_it() -> None:
    """The connector parses the proxy's parameters with the intended meaning (B2.2, B2.3, B2.5)."""
    miss = TransferParams.parse(first_turn())
    hit = TransferParams.parse(next_turn(HELD))
    alone = TransferParams.parse(hold_only())
    assert (miss.do_remote_decode, miss.remote, miss.has_blocks) == (True, None, False)
    assert (hit.do_remote_decode, hit.has_blocks, hit.num_tokens) == (True, True, 23)
    assert (alone.do_remote_prefill, alone.do_remote_decode, alone.remote) == (True, False, None)
    assert (hit.remote.engine_id, hit.remote.request_id, hit.remote.host, hit.remote.port) == ("d0", "r", "h", 7070)


def test_a_named_hold_reads_like_one_that_d_spoke_of() -> None:
    """It differs from a reported hold only in the blocks, which the claim returns."""
    engine = EngineIdentity.parse(HELD)
    named = engine.named_hold("r", 23)
    assert is_usable(named)
    assert TransferParams.parse(named) == TransferParams.parse({**HELD, "remote_blocks_expiry_time": None})
    assert named["tp_size"] == 2


def test_the_configured_address_is_used() -> None:
    """B2.22 Only the remote host and port are replaced, by the address of D that is configured."""
    assert Address("10.0.0.3", 7171).replacing(HELD) == {**HELD, "remote_host": "10.0.0.3", "remote_port": 7171}


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("d1:7070", Address("d1", 7070)),
        ("10.0.0.3:1", Address("10.0.0.3", 1)),
        ("[::1]:7070", Address("::1", 7070)),
        ("unix:/run/kvtier.sock", Address("unix:/run/kvtier.sock", 0)),
    ],
)
def test_addresses_of_servers(text: str, address: Address) -> None:
    """Addresses have the form of kvtier's settings."""
    assert Address.parse(text) == address


@pytest.mark.parametrize("text", ["", "d1", "d1:", ":7070", "d1:port", "d1:0", "d1:65536", "unix:"])
def test_what_is_no_address(text: str) -> None:
    """A typo raises at start."""
    with pytest.raises(ValueError, match="neither host:port nor unix:PATH"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("change", "usable"),
    [
        ({}, True),
        ({"remote_block_ids": [[], [4]]}, True),
        ({"remote_port": 0}, True),
        ({"remote_block_ids": None}, False),
        ({"remote_block_ids": []}, False),
        ({"remote_block_ids": [[], []]}, False),
        ({"remote_block_ids": 3}, False),
        ({"remote_num_tokens": 0}, False),
        ({"remote_num_tokens": None}, False),
        ({"remote_engine_id": None}, False),
        ({"remote_request_id": ""}, False),
        ({"remote_host": None}, False),
        ({"remote_port": None}, False),
    ],
)
def test_what_is_worth_keeping(change: dict[str, Any], usable: bool) -> None:  # noqa: FBT001
    """B2.3 Blocks, and all four keys: other answers are not recorded and count as a miss."""
    assert is_usable({**HELD, **change}) is usable


@pytest.mark.parametrize(
    "params", [None, "text", [], {}, {"remote_engine_id": 7, "remote_host": "h", "remote_port": 1}]
)
def test_an_engine_without_an_identity(params: object) -> None:
    """Without an identity nothing is recorded."""
    assert EngineIdentity.parse(params) is None
    assert not is_usable(params)
