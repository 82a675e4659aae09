"""Drivers of LMCache's own clients of a store, for `bench.remote_lmcache`.

They are to LMCache what a shared tier is to kvtier: they move blocks between the memory of LMCache
and a store. The benchmark calls them directly, so no server or engine runs around them. The
environment variable `ADAPTER` has their settings.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from numpy.typing import NDArray

from .base import Blocks, PeerFailed, PeerMissing

__all__ = ["ADAPTER", "LMCacheAdapter", "LMCacheConnector"]

ADAPTER = "KVTIER_BENCH_ADAPTER"
PATIENCE_MS = 60_000
CHUNK_TOKENS = 16


class LMCacheAdapter:
    """L2 adapter of LMCache's server, with settings as for `lmcache server --l2-adapter`.

    The benchmark times the calls of LMCache's controllers: they submit a task, and wait for the
    event that reports its end. The adapter's objects are the benchmark's blocks.
    """

    def __init__(self) -> None:
        self._adapter: Any = None
        self._objects: dict[int, TensorMemoryObj] = {}

    def start(self, directory: Path, capacity_bytes: int) -> None:
        del directory, capacity_bytes
        settings = json.loads(os.environ[ADAPTER])
        self._model = settings.pop("model", "bench")
        try:
            config = get_l2_adapter_config_class(settings["type"]).from_dict(settings)
            self._adapter = create_l2_adapter(config)
        except (ImportError, RuntimeError) as error:
            raise PeerMissing(str(error)) from error

    def version(self) -> str:
        return metadata.version("lmcache")

    def processes(self) -> Sequence[int]:
        return [os.getpid()]

    def open(self, block_bytes: int, memory: Sequence[NDArray[np.uint8]]) -> None:
        self._objects = {}
        for array in memory:
            for row in array.reshape(-1, block_bytes):
                tensor = torch.from_numpy(row)
                described = MemoryObjMetadata(
                    shape=tensor.shape,
                    dtype=torch.uint8,
                    address=row.ctypes.data,
                    phy_size=block_bytes,
                    ref_count=1,
                    fmt=MemoryFormat.BINARY,
                )
                self._objects[row.ctypes.data] = TensorMemoryObj(tensor, described, None)

    def names(self, keys: Sequence[bytes]) -> list[ObjectKey]:
        return [ObjectKey(chunk_hash=key, model_name=self._model, kv_rank=0) for key in keys]

    def store(self, names: list[ObjectKey], blocks: Blocks) -> None:
        task = self._adapter.submit_store_task(names, [self._objects[address] for address in blocks.addresses])
        self._wait(self._adapter.get_store_event_fd())
        if not self._adapter.pop_completed_store_tasks()[task].is_successful():
            raise PeerFailed("a store failed")

    def load(self, names: list[ObjectKey], blocks: Blocks) -> None:
        task = self._adapter.submit_load_task(names, [self._objects[address] for address in blocks.addresses])
        self._wait(self._adapter.get_load_event_fd())
        loaded = self._adapter.query_load_result(task)
        if loaded is None or loaded.popcount() != len(names):
            raise PeerFailed("a load failed")

    def lookup(self, names: list[ObjectKey]) -> int:
        raise NotImplementedError

    def settle(self) -> None:
        """Does nothing, because the benchmark locks no block."""

    def drop(self, names: list[ObjectKey]) -> None:
        self._adapter.delete(names)

    def stop(self) -> None:
        if self._adapter is not None:
            self._adapter.close()

    @staticmethod
    def _wait(event: int) -> None:
        poll = select.poll()
        poll.register(event, select.POLLIN)
        if not poll.poll(PATIENCE_MS):
            raise PeerFailed("a task does not end")
        os.read(event, 8)


class LMCacheConnector:
    """Remote connector of LMCache in the engine's process, with settings of LMCache's engine.

    Its objects are in the memory of LMCache's own CPU backend, which the connector may register at
    the store. The copies between them and the benchmark's blocks are not timed.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._connector: Any = None
        self._objects: dict[int, MemoryObj] = {}
        self._loaded: list[MemoryObj] = []
        self._into: list[NDArray[np.uint8]] = []

    def start(self, directory: Path, capacity_bytes: int) -> None:
        del directory, capacity_bytes
        self._settings = json.loads(os.environ[ADAPTER])

    def version(self) -> str:
        return metadata.version("lmcache")

    def processes(self) -> Sequence[int]:
        return [os.getpid()]

    def open(self, block_bytes: int, memory: Sequence[NDArray[np.uint8]]) -> None:
        self._close()
        extra = {"save_chunk_meta": False, **self._settings["extra_config"]}
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS, max_local_cpu_size=1.0, remote_url=self._settings["url"], extra_config=extra
        )
        shape = (1, 2, CHUNK_TOKENS, 1, block_bytes // (2 * 2 * CHUNK_TOKENS))
        described = LMCacheMetadata("bench", 1, 1, 0, 0, torch.float16, shape, chunk_size=CHUNK_TOKENS)
        self._backend = LocalCPUBackend(config, described, "cpu")
        self._connector = CreateConnector(self._settings["url"], self._loop, self._backend, config, described)
        for row in memory[0].reshape(-1, block_bytes):
            held = self._backend.allocate(described.get_shapes(), described.get_dtypes(), MemoryFormat.KV_2LTD)
            _bytes_of(held)[:] = row
            self._objects[row.ctypes.data] = held

    def names(self, keys: Sequence[bytes]) -> list[CacheEngineKey]:
        return [CacheEngineKey("bench", 1, 0, int.from_bytes(key[:8], "big") >> 1, torch.float16) for key in keys]

    def store(self, names: list[CacheEngineKey], blocks: Blocks) -> None:
        objects = [self._objects[address] for address in blocks.addresses]
        for one in objects:
            one.ref_count_up()  # the connector releases an object that it has stored
        self._loop.run_until_complete(self._connector.batched_put(names, objects))

    def load(self, names: list[CacheEngineKey], blocks: Blocks) -> None:
        self._loaded = self._loop.run_until_complete(self._connector.batched_get(names))
        self._into = blocks.arrays
        if len(self._loaded) != len(names) or None in self._loaded:
            raise PeerFailed("a load failed")

    def lookup(self, names: list[CacheEngineKey]) -> int:
        raise NotImplementedError

    def settle(self) -> None:
        for held, block in zip(self._loaded, self._into, strict=False):
            block[:] = _bytes_of(held)
            held.ref_count_down()
        self._loaded = []

    def drop(self, names: list[CacheEngineKey]) -> None:
        self._connector.getWrappedConnector().store.batch_remove([name.to_string() for name in names], True)

    def stop(self) -> None:
        self._close()
        self._loop.close()

    def _close(self) -> None:
        if self._connector is not None:
            self._loop.run_until_complete(self._connector.close())
        self._connector = None
        self._objects.clear()


def _bytes_of(held: MemoryObj) -> NDArray[np.uint8]:
    return np.frombuffer(held.byte_array, np.uint8)
