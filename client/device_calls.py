"""What the clients offer for blocks on a device: the same for both, but for `await`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from .device import KvBuffers, Mark
from .effects import Operation
from .operations import Operations
from .results import LookupResult

__all__ = ["AsyncDeviceCalls", "DeviceCalls"]

T = TypeVar("T")


class _Sync(Protocol):
    _operations: Operations

    def _run(self, operation: Operation[T]) -> T: ...


class _Async(Protocol):
    _operations: Operations

    async def _run(self, operation: Operation[T]) -> T: ...


class DeviceCalls:
    """Part of `Client`: the server copies between its slots and blocks on this process' device (transport cuda_ipc)."""

    def register_kv_buffers(self: _Sync, buffers: KvBuffers) -> None:
        """Has the server open blocks on a device; from then on every server, and every life of it, without being asked.

        May take seconds: the server starts a process for the device.

        Raises:
            DeviceUnavailable: it cannot; the message says why, beginning with the cause. The other calls of this client work.
        """
        self._run(self._operations.register_kv_buffers(buffers))

    def store_from_device(
        self: _Sync,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        after: Mark | None = None,
        request_id: str = "",
        retain_for: float | None = None,
    ) -> bytes:
        """Stores block ``blocks[i]`` of this process' device under ``keys[i]``, whose group says in which tensors it is.

        Args:
            keys: names of the blocks.
            blocks: where they are; each only once per group.
            after: the compute that fills them; None: it is over.
            request_id: as with `store`.
            retain_for: as with `store`.

        Returns:
            One `StoreStatus` per key. When it returns or raises nothing reads the blocks any more, unless the server was lost.

        Raises:
            DeviceUnavailable: the server cannot, or not now; other calls may work.
        """
        operation = self._operations.store_from_device(
            keys, blocks, request_id=request_id, retain_for=retain_for, after=after
        )
        return self._run(operation)

    def load_to_device(
        self: _Sync,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        after: Mark | None = None,
        request_id: str = "",
        wait: float = 0.0,
    ) -> int:
        """Fills blocks of this process' device with the leading hits of ``keys``; returns how many. The rest is as it was.

        When it returns or raises nothing is written to the blocks any more; after an error they hold anything. ``after`` is
        the last compute that uses what they hold now.

        Raises:
            DeviceUnavailable: the server cannot, or not now; other calls may work.
        """
        operation = self._operations.load_to_device(keys, blocks, request_id=request_id, wait=wait, after=after)
        return self._run(operation)

    def read_to_device(
        self: _Sync,
        lease: LookupResult | int,
        items: Sequence[int],
        blocks: Sequence[int],
        *,
        after: Mark | None = None,
    ) -> None:
        """Fills blocks with items of a lease, which may be another client's of this engine; otherwise as `load_to_device`."""
        self._run(self._operations.read_to_device(lease, items, blocks, after=after))


class AsyncDeviceCalls:
    """Part of `AsyncClient`; see `DeviceCalls`."""

    async def register_kv_buffers(self: _Async, buffers: KvBuffers) -> None:
        """See `DeviceCalls.register_kv_buffers`."""
        await self._run(self._operations.register_kv_buffers(buffers))

    async def store_from_device(
        self: _Async,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        after: Mark | None = None,
        request_id: str = "",
        retain_for: float | None = None,
    ) -> bytes:
        """See `DeviceCalls.store_from_device`."""
        operation = self._operations.store_from_device(
            keys, blocks, request_id=request_id, retain_for=retain_for, after=after
        )
        return await self._run(operation)

    async def load_to_device(
        self: _Async,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        after: Mark | None = None,
        request_id: str = "",
        wait: float = 0.0,
    ) -> int:
        """See `DeviceCalls.load_to_device`."""
        operation = self._operations.load_to_device(keys, blocks, request_id=request_id, wait=wait, after=after)
        return await self._run(operation)

    async def read_to_device(
        self: _Async,
        lease: LookupResult | int,
        items: Sequence[int],
        blocks: Sequence[int],
        *,
        after: Mark | None = None,
    ) -> None:
        """See `DeviceCalls.read_to_device`."""
        await self._run(self._operations.read_to_device(lease, items, blocks, after=after))
