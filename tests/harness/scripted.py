"""Scripted transport: a test performs a client's operation and gives the result of each effect."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from kvtier.client.effects import Call, Connect
from kvtier.client.operations import Operations
from kvtier.client.session.session import ClientSession
from kvtier.client.timeouts import Timeouts
from kvtier.cuda.host.copy import address_of
from kvtier.protos.v1 import common_pb2, session_pb2

from .payloads import namespace_of

__all__ = ["PART", "TIMEOUTS", "Script"]

PART = 8
TIMEOUTS = Timeouts(connect=1.0, call=2.0, transfer=3.0, device=4.0)


class Script:
    """Performs operations. The results of effects are given: an answer, an error, or a function."""

    def __init__(self, *, region_bytes: int = 0) -> None:
        """`region_bytes`: size of the region that the session has mapped; 0 for none."""
        capabilities = session_pb2.CapabilitiesResponse(devices={"offered": True})
        capabilities.limits.max_frame_bytes = 1 << 20
        self.memory = bytearray(region_bytes)
        region = SimpleNamespace(
            memory=memoryview(self.memory), address=address_of(self.memory)[0], begin=0, end=region_bytes
        )
        attachment: Any = SimpleNamespace(region=region) if region_bytes else None
        self.session = ClientSession(common_pb2.SessionRef(session_id=bytes(16)), capabilities, attachment, "")
        self.invalidated: list[ClientSession] = []
        self.withdrawn: list[int] = []
        self.effects: list[Any] = []
        self.operations = Operations(namespace_of(PART), TIMEOUTS, self)  # type: ignore[arg-type]

    def invalidate(self, session: ClientSession) -> None:
        self.invalidated.append(session)

    def withdraw(self, session: ClientSession, grant_id: int) -> None:
        assert session is self.session
        self.withdrawn.append(grant_id)

    def perform(self, operation: Generator[Any, Any, Any], *results: Any) -> Any:
        left = iter(results)
        try:
            effect = next(operation)
            while True:
                if isinstance(effect, Connect):
                    assert effect.timeout == TIMEOUTS.connect
                    effect = operation.send(self.session)
                    continue
                self.effects.append(effect)
                result = next(left, AssertionError(f"no result for {effect}"))
                if callable(result):
                    result = result(effect)
                effect = operation.throw(result) if isinstance(result, Exception) else operation.send(result)
        except StopIteration as end:
            assert next(left, None) is None, "fewer effects than results"
            return end.value

    def calls(self) -> list[str]:
        return [each.method if isinstance(each, Call) else type(each).__name__ for each in self.effects]
