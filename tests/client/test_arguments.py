"""Wrong arguments of the client are refused at once, with the valid choices in the error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from harness.payloads import key_of, namespace_of

from kvtier.client import (
    AsyncClient,
    Client,
    Group,
    InvalidRequest,
    Namespace,
    TierFilter,
    Timeouts,
    make_key,
)
from kvtier.client.operations.arguments import encoded
from kvtier.client.testing import FakeServer

NAMESPACE = namespace_of(4096)
NOWHERE = "unix:/nonexistent/s"
KEY = key_of(0)
ENDLESS: dict[str, Any] = {}
ENDLESS["a"] = ENDLESS


@pytest.mark.parametrize("make", [Client, AsyncClient])
@pytest.mark.parametrize("transport", ["rdma", "SHM", "", None, 1])
def test_an_unknown_transport_is_refused(make: Any, transport: Any) -> None:
    """The error lists the transports that exist."""
    with pytest.raises(InvalidRequest, match="one of auto, shm, tcp, grpc, cuda_ipc, not ") as refused:
        make(NOWHERE, namespace=NAMESPACE, transport=transport)
    assert repr(transport) in str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [{"rank": -1}, {"rank": "0"}, {"name": 5}, {"namespace": Namespace(5, "uint8", NAMESPACE.groups)}, {"pin": True}],  # type: ignore[arg-type]
    ids=["negative rank", "rank", "name", "namespace", "pin"],
)
def test_a_value_of_the_wrong_type_is_refused(arguments: dict[str, Any]) -> None:
    """The constructor refuses it. Otherwise each attempt to connect would fail."""
    with pytest.raises(InvalidRequest):
        Client(NOWHERE, **({"namespace": NAMESPACE} | arguments))


@pytest.mark.parametrize("kind", ["sliding_window", 1, None])
def test_an_unknown_kind_of_group_is_refused(kind: Any) -> None:
    with pytest.raises(
        ValueError, match=r"one of GroupKind\.FULL_ATTENTION, GroupKind\.SLIDING_WINDOW, GroupKind\.STATE"
    ):
        Group(4096, 16, kind=kind)


@pytest.mark.parametrize("seconds", [-1, -0.5, float("nan"), float("inf"), "2", None, True])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(seconds: Any) -> None:
    with pytest.raises(InvalidRequest, match="connect must be a number of seconds from 0"):
        Timeouts(connect=seconds)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "2"])
def test_a_wait_that_is_no_number_of_seconds_is_refused(seconds: Any) -> None:
    with (
        contextlib.closing(Client(NOWHERE, namespace=NAMESPACE)) as client,
        pytest.raises(InvalidRequest, match="timeout must be a number"),
    ):
        client.wait_until_connected(seconds)


CALLS: dict[str, tuple[Callable[[Client], object], str]] = {
    "direction": (
        lambda client: client.publish("r", [KEY], [0], num_tokens=1, direction="decode_to_prefill"),  # type: ignore[arg-type]
        "direction must be one of HandoffDirection.PREFILL_TO_DECODE, HandoffDirection.DECODE_TO_PREFILL",
    ),
    "direction, number": (
        lambda client: client.publish("r", [KEY], [0], num_tokens=1, direction=7),  # type: ignore[arg-type]
        "direction must be one of",
    ),
    "medium": (
        lambda client: client.lookup([KEY], exclude=TierFilter(media=["tape"])),  # type: ignore[list-item]
        "media must be one of Medium.MEMORY, Medium.DISK, Medium.NETWORK, not 'tape'",
    ),
    "one medium": (
        lambda client: client.lookup([KEY], exclude=TierFilter(media="disk")),  # type: ignore[arg-type]
        "media must be a collection",
    ),
    "one tier": (
        lambda client: client.lookup([KEY], exclude=TierFilter(names="lmdb")),
        "names must be a collection, not 'lmdb'",
    ),
    "negative wait": (lambda client: client.lookup([KEY], wait=-1), "wait must be a number of seconds from 0"),
    "NaN": (lambda client: client.flush([KEY], wait=float("nan")), "not nan"),
    "endless wait": (lambda client: client.reset(wait=float("inf")), "not inf"),
    "negative retention": (lambda client: client.lookup([KEY], retain_for=-0.1), "retain_for must be a number"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_of_a_call_is_refused(name: str) -> None:
    """The client does not send the call."""
    call, words = CALLS[name]
    server = FakeServer()
    with server.client(NAMESPACE) as client:
        with pytest.raises(InvalidRequest) as refused:
            call(client)
        assert words in str(refused.value)
    assert server.calls == []


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("abc",), TypeError, "block_hash must be bytes, not str"),
        ((bytearray(b"abc"),), TypeError, "block_hash must be bytes, not bytearray"),
        ((b"",), ValueError, "block_hash must not be empty"),
        ((b"abc", -1), ValueError, "fits into 4 bytes, not -1"),
        ((b"abc", 1 << 32), ValueError, "fits into 4 bytes, not 4294967296"),
    ],
)
def test_a_key_without_a_hash_is_refused(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    """An empty hash would give all blocks of a group the same key."""
    with pytest.raises(error, match=words):
        make_key(*arguments)


@pytest.mark.parametrize("method", ["lookup", "prefetch", "begin_request", "store"])
def test_an_unknown_option_is_refused(method: str) -> None:
    """As Python refuses an unknown keyword. An option of another call is refused too."""
    with FakeServer().client(NAMESPACE) as client:
        call = getattr(client, method)
        arguments = {"begin_request": ["r"], "store": [[], []]}.get(method, [[]])
        with pytest.raises(TypeError, match="unexpected keyword argument 'wiat'"):
            call(*arguments, wiat=1.0)
        other = {"prefetch": {"min_hits": 2}, "store": {"wait": 1.0}}.get(method, {})
        if other:
            with pytest.raises(InvalidRequest, match=next(iter(other))):
                call(*arguments, **other)


@pytest.mark.parametrize(
    "params",
    [{"a": object()}, {"a": float("inf")}, {"a": float("nan")}, [("a", 1)], "text", [], ENDLESS],
    ids=["object", "infinite", "nan", "list", "text", "empty list", "endless"],
)
def test_transfer_params_that_json_cannot_have_are_refused(params: Any) -> None:
    """Some JSON parsers accept `Infinity` and `NaN`."""
    with pytest.raises(InvalidRequest, match="kv_transfer_params"):
        encoded({"kv_transfer_params": params})


@pytest.mark.parametrize(("params", "text"), [(None, ""), ({}, ""), ({"é": [1, None]}, '{"é": [1, null]}')])
def test_transfer_params_as_json(params: Any, text: str) -> None:
    """Letters are not escaped, because the length of the text is limited."""
    assert encoded({"kv_transfer_params": params}) == {"kv_transfer_params_json": text}
