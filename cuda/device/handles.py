"""Open allocations of engines, with reference counts.

A process maps each allocation only once, and closes it when its last user has closed it.

Several users may share one allocation: groups that share tensors, or the old and the new session of
an engine that registers again. As long as an allocation is open, its memory is not freed, even if
the engine has ended.
"""

from __future__ import annotations

import contextlib
import threading

from .device_errors import Cause, DeviceError
from .driver_contract import Driver
from .exports import DeviceExport, Origin, likely_cause, obstacle

__all__ = ["OpenHandles"]


class OpenHandles:
    """Reference counts of one driver's open allocations. Any thread may call."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._open: dict[bytes, tuple[int, int]] = {}  # handle: address, users

    @property
    def allocations(self) -> int:
        """Number of open allocations."""
        return len(self._open)

    def open(self, export: DeviceExport) -> list[int]:
        """Opens all allocations or none; returns the addresses.

        Raises DeviceError with the likely cause.
        """
        here = Origin.here()
        refusal = obstacle(export.origin, here)
        if refusal is not None:
            raise refusal
        addresses: list[int] = []
        with contextlib.ExitStack() as undo:
            for allocation in export.allocations:
                try:
                    addresses.append(self._open_one(allocation.handle))
                except DeviceError as error:
                    raise likely_cause(error, export.origin, here) from error
                undo.callback(self._close_one, allocation.handle)
                self._check_size(addresses[-1], allocation.nbytes)
            undo.pop_all()
        return addresses

    def close(self, export: DeviceExport) -> None:
        """Undoes one `open`. No copy must use the memory any more."""
        with contextlib.ExitStack() as stack:  # closes all even if one of them fails
            for allocation in export.allocations:
                stack.callback(self._close_one, allocation.handle)

    def _check_size(self, address: int, nbytes: int) -> None:
        """Checks the exported size: a copy beyond the end would break the context of the device."""
        found = self._driver.allocation_of(address)
        if found.base + found.nbytes < address + nbytes:
            raise DeviceError(Cause.BAD_EXPORT, f"an allocation has {found.nbytes} bytes, not {nbytes}")

    def _open_one(self, handle: bytes) -> int:
        with self._lock:
            if handle in self._open:
                address, users = self._open[handle]
            else:
                address, users = self._driver.open_memory(handle), 0
            self._open[handle] = address, users + 1
            return address

    def _close_one(self, handle: bytes) -> None:
        with self._lock:
            address, users = self._open[handle]
            if users > 1:
                self._open[handle] = address, users - 1
                return
            del self._open[handle]
            self._driver.close_memory(address)
