"""Records the calls of a client, in the order in which it makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier.client import Client
from kvtier.client.effects import Call, Effect

__all__ = ["record_calls"]


def record_calls(*clients: Client) -> list[str]:
    """Returns a list that gets the name of each call of these clients from now on."""
    calls: list[str] = []

    def recording(perform: Callable[[Effect], Any]) -> Callable[[Effect], Any]:
        def record(effect: Effect) -> Any:
            if isinstance(effect, Call):
                calls.append(effect.method)
            return perform(effect)

        return record

    for client in clients:
        transport: Any = client._transport
        transport.perform = recording(type(transport).perform.__get__(transport))
    return calls
