"""Operations of both clients (`Client`, `AsyncClient`): generators of effects (`effects.py`)."""

from __future__ import annotations

from ...protos.v1 import admin_pb2
from ..effects import Call, Operation
from .devices import DeviceOperations
from .handoff import HandoffOperations
from .loads import LoadOperations, Reading
from .stores import StoreOperations, Writing

__all__ = ["Operations", "Reading", "Writing"]


class Operations(LoadOperations, StoreOperations, HandoffOperations, DeviceOperations):
    """All operations of one client. `AsyncClient` documents them."""

    def status(self) -> Operation[admin_pb2.GetStatusResponse]:
        answer: admin_pb2.GetStatusResponse = yield Call(
            "AdminService/GetStatus", admin_pb2.GetStatusRequest(), self._timeouts.call
        )
        return answer
