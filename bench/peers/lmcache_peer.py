"""Driver of LMCache's server over shared memory, with LMCache's client classes.

The benchmark times LMCache's best case: it copies blocks directly between the client's memory and
the slots. An engine's worker would first gather each block from paged memory. The server names
blocks by chained hashes of tokens, which it computes itself. So the driver converts each key to 16
tokens.
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from numpy.typing import NDArray

from bench.engine.lmcache import LmcacheServer, server_settings

from .base import Blocks, PeerFailed

__all__ = ["LMCache"]

TIMEOUT = 30.0
CHUNK_TOKENS = 16
Tokens = tuple[int, ...]


class LMCache:
    """`lmcache server` over ZMQ. ZMQ is its default and faster than its gRPC."""

    def __init__(self) -> None:
        self._server: LmcacheServer | None = None
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._client: Any = None
        self._transfer: Any = None
        self._model = ""
        self._requests = itertools.count()
        self._request = ""
        self._locked: Any = None
        self._since_pause = 0

    def start(self, directory: Path, capacity_bytes: int) -> None:
        # The server looks for blocks to evict once per second, and refuses stores when it is full.
        # So it gets twice the space and evicts early. It evicts stored blocks before loaded blocks.
        settings = [*server_settings(2 * capacity_bytes, CHUNK_TOKENS), "--eviction-trigger-watermark", "0.65"]
        settings += ["--eviction-ratio", "0.3"]
        self._breath = capacity_bytes // 8
        self._server = LmcacheServer(Path(sys.executable).parent / "lmcache", directory, settings)
        self._server.__enter__()
        self._client = RequestClientFactory.create(f"tcp://127.0.0.1:{self._server.port}", context=self._context)

    def processes(self) -> Sequence[int]:
        assert self._server is not None
        return [self._server.pid]

    def open(self, block_bytes: int, memory: Sequence[NDArray[np.uint8]]) -> None:
        del memory
        self._clear()
        self._leave()
        hidden = block_bytes // (2 * 2 * CHUNK_TOKENS)
        head = min(128, hidden)
        kv = {"layer.0": torch.zeros((2, 2, CHUNK_TOKENS, hidden // head, head), dtype=torch.float16)}
        self._model = f"bench-{block_bytes}"
        self._transfer = EngineDrivenTransferContext(os.getpid(), self._client)
        self._transfer.register(
            kv,
            self._model,
            1,
            1,
            TIMEOUT,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[EngineGroupInfo(engine_group_id=0, layer_indices=(0,), tokens_per_block=CHUNK_TOKENS)],
            engine_type=EngineType.VLLM,
        )
        if "Shm" not in type(self._transfer.engine_driven_context).__name__:
            raise PeerFailed("the server does not offer shared memory")

    def names(self, keys: Sequence[bytes]) -> Tokens:
        return tuple(itertools.chain.from_iterable(struct.unpack("<16H", key) for key in keys))

    def store(self, names: Tokens, blocks: Blocks) -> None:
        key, slots = self._key(names, 0), self._transfer.engine_driven_context
        prepared = slots.prepare_store(key, os.getpid())
        if prepared is None or len(prepared[1]) != len(blocks.arrays):
            raise PeerFailed(f"no room for {len(blocks.arrays)} blocks")
        for tensor, number in zip(*prepared, strict=True):
            np.copyto(_bytes_of(tensor), blocks.arrays[number])
        if not slots.commit_store(key, os.getpid(), prepared[0]):
            raise PeerFailed("a store was not committed")
        self._since_pause += sum(blocks.sizes)

    def load(self, names: Tokens, blocks: Blocks) -> None:
        hits = self.lookup(names)
        if hits != len(blocks.arrays):
            raise PeerFailed(f"{hits} of {len(blocks.arrays)} blocks are there")
        key, slots = self._key(names, 0, self._request), self._transfer.engine_driven_context
        tensors = slots.prepare_retrieve(key, os.getpid())
        if tensors is None:
            raise PeerFailed("a block that a lookup found cannot be retrieved")
        for tensor, array in zip(tensors, blocks.arrays, strict=True):
            np.copyto(array, _bytes_of(tensor))
        slots.commit_retrieve(key, os.getpid())
        self._locked = None

    def lookup(self, names: Tokens) -> int:
        self._locked = key = self._key(names, None)
        self._client.lookup(key, 1).result(timeout=TIMEOUT)
        while (hits := self._client.query_prefetch_status(self._request).result(timeout=TIMEOUT)) is None:
            pass
        return int(hits)

    def settle(self) -> None:
        locked, self._locked = self._locked, None
        if locked is not None:
            self._client.free_lookup_locks(locked, 1).result(timeout=TIMEOUT)
        self._client.end_session(self._request).result(timeout=TIMEOUT)

    def drop(self, names: Tokens) -> None:
        """Waits for the eviction, because the server has no call to remove blocks."""
        if self._since_pause >= self._breath:
            self._since_pause = 0
            time.sleep(1.1)

    def stop(self) -> None:
        if self._client is not None:
            self._leave()
            self._client.close()
        self._context.term()
        if self._server is not None:
            self._server.__exit__(None, None, None)

    def _clear(self) -> None:
        # The server publishes the last stored blocks a few milliseconds later.
        time.sleep(0.2)
        self._client.clear(True).result(timeout=TIMEOUT)

    def _leave(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            left = transfer.unregister()
            if left is not None:
                left.result(timeout=TIMEOUT)
            transfer.close()

    def _key(self, names: Tokens, worker: int | None, request: str | None = None) -> IPCCacheServerKey:
        self._request = request or f"bench-{next(self._requests)}"
        return IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=worker,
            token_ids=names,
            start=0,
            end=len(names),
            request_id=self._request,
            num_kv_readers=1,
        )


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.view(torch.int16).numpy().reshape(-1).view(np.uint8)
