"""Hellos of connections for calls: they take turns of the event loop, in few pieces."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.protos.wire.socket_frames import Purpose, pack_hello
from kvtier.server.rpc.attach_socket import AttachServer, _Handshake
from kvtier.server.rpc.slice_scheduler import SliceScheduler

HELLO = pack_hello(Purpose.CALLS, bytes(16), 1, 0)


def scheduler() -> SliceScheduler:
    return SliceScheduler(SimpleNamespace(tenant_of=lambda _: "zeta", check=lambda _: None))  # type: ignore[arg-type]


async def test_a_handshake_waits_for_its_turn() -> None:
    """Unknown callers use at most half of the event loop while a tenant calls."""
    turns, anything = scheduler(), Any
    calls = SimpleNamespace(turns=turns)
    attach = AttachServer(anything, anything, anything, calls, SimpleNamespace(tls=None))  # type: ignore[arg-type]
    unknown, tenant = turns.account_without_session(None), turns.account_without_session("zeta")
    for account in (tenant, unknown):
        turns.charge(account, asyncio.get_running_loop().time() - 0.2, 0.2)
    used = unknown.used
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(HELLO)
        entered = []
        enter = turns.enter

        async def spy(account: Any) -> None:
            entered.append(account)
            await enter(account)
            assert ours.recv(len(HELLO), socket.MSG_PEEK) == HELLO, "nothing was read before the turn"

        turns.enter = spy  # type: ignore[method-assign]
        transport, hello, _ = await attach._handshake(ours)
        assert (entered, hello.purpose) == ([unknown], Purpose.CALLS)
        assert unknown.used > used, "the handshake is charged"
        transport.abort()


async def test_a_hello_in_single_bytes_ends_the_connection() -> None:
    handshake = _Handshake()
    handshake.connection_made(pausing := Pausing())
    for byte in HELLO[:-1]:
        if handshake.received.done():
            break
        handshake.get_buffer(-1)[0] = byte
        handshake.buffer_updated(1)
    assert pausing.is_paused
    with pytest.raises(ValueError, match="pieces"):
        await handshake.received


class Pausing(asyncio.Transport):
    is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True
