"""A session with raw stubs and registered KV tensors, for calls that the client never makes."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from harness.raw import RawSession, refusal_of

from devices.kv import JOINED
from devices.service import Engine, Service, namespace_of
from kvtier.client.device import registration_of
from kvtier.protos.v1 import cache_pb2, transfer_pb2, transfer_pb2_grpc
from kvtier.protos.wire.packed_keys import pack_keys

__all__ = ["PART", "Caller", "refusal_reason"]

PART = JOINED.layout().part_bytes


def refusal_reason(call: Any, request: Any) -> str | None:
    """The reason of a refused call."""
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=60)
    return refusal_of(caught.value)[1]


class Caller:
    """A session with raw stubs and KV tensors to register."""

    def __init__(self, service: Service, engine_id: str) -> None:
        self.engine = Engine(service.server.endpoint)
        self.raw = RawSession(service.server.endpoint, namespace_of(JOINED), engine_id=engine_id)
        self.calls = transfer_pb2_grpc.TransferServiceStub(self.raw.channel)
        self.buffers_id = 0

    def registration(self) -> transfer_pb2.RegisterDeviceBuffersRequest:
        request = registration_of(self.engine.buffers.export)
        request.session.CopyFrom(self.raw.ref)
        return request

    def register(self) -> None:
        self.buffers_id = self.calls.RegisterDeviceBuffers(self.registration(), timeout=60).buffers_id

    def prepare(self, keys: list[bytes]) -> int:
        """The id of a new store of these keys."""
        request = cache_pb2.PrepareStoreRequest(session=self.raw.ref, keys=pack_keys(keys))
        store_id: int = self.raw.cache.PrepareStore(request, timeout=60).store_id
        return store_id

    def discard(self, store_id: int, blocks: int) -> None:
        request = cache_pb2.CompleteStoreRequest(session=self.raw.ref, store_id=store_id, failed_items=range(blocks))
        self.raw.cache.CompleteStore(request, timeout=60)

    def store(self, store_id: int, **fields: Any) -> str | None:
        fields = {"session": self.raw.ref, "buffers_id": self.buffers_id, "store_id": store_id} | fields
        return refusal_reason(self.calls.StoreFromDevice, transfer_pb2.StoreFromDeviceRequest(**fields))

    def load(self, lease_id: int, **fields: Any) -> str | None:
        fields = {"session": self.raw.ref, "buffers_id": self.buffers_id, "lease_id": lease_id} | fields
        return refusal_reason(self.calls.LoadToDevice, transfer_pb2.LoadToDeviceRequest(**fields))

    def close(self) -> None:
        self.raw.__exit__(None, None, None)
        self.engine.close()
