"""Client of the stand-in, with those methods and error codes of Mooncake that kvtier uses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from multiprocessing.connection import Client
from typing import Any

__all__ = ["MooncakeDistributedStore"]

INVALID_PARAMS, OBJECT_NOT_FOUND, TRANSFER_FAIL, RPC_FAIL = -600, -704, -800, -900


class MooncakeDistributedStore:
    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int:
        host, _, port = master_server_addr.rpartition(":")
        self._master = (host, int(port))
        return 0 if self._ask("exist", [""]) == [0] else -1

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return self._ask("exist", keys)

    def get_size(self, key: str) -> int:
        return self._ask("size", [key])[0]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:  # noqa: FBT001 - as in Mooncake
        return self._ask("remove", keys)

    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        return self._ask("put", keys, list(map(ctypes.string_at, buffer_ptrs, sizes)))

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        return self.batch_get_into_multi_buffers(keys, [[each] for each in buffer_ptrs], [[each] for each in sizes])

    def batch_put_from_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        values = [b"".join(map(ctypes.string_at, *each)) for each in zip(all_buffer_ptrs, all_sizes, strict=True)]
        return self._ask("put", keys, values)

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        found = self._ask("get", keys)
        return [_fill(value, *place) for value, *place in zip(found, all_buffer_ptrs, all_sizes, strict=True)]

    def _ask(self, call: str, keys: list[str], values: Sequence[bytes] = ()) -> list[Any]:
        try:
            with Client(self._master) as connection:
                connection.send((call, keys, values))
                answer: list[Any] = connection.recv()
        except (OSError, EOFError):
            return [RPC_FAIL] * len(keys)
        return answer


def _fill(value: bytes | int | None, addresses: list[int], sizes: list[int]) -> int:
    if isinstance(value, int):
        return value
    if value is None:
        return OBJECT_NOT_FOUND
    if sum(sizes) != len(value):
        return INVALID_PARAMS if sum(sizes) < len(value) else TRANSFER_FAIL
    at = 0
    for address, size in zip(addresses, sizes, strict=True):
        ctypes.memmove(address, value[at : at + size], size)
        at += size
    return len(value)
