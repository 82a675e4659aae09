"""Drivers of kvtier: over shared memory, over plain TCP sockets and over gRPC."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bench.service import Service
from bench.workload import connect
from kvtier.client import Client, Lease, StoreStatus, make_key

from .base import Blocks, PeerFailed

__all__ = ["Grpc", "Shm", "Tcp"]

_FOUND_SECONDS = 2.0
"""More than a client needs to find the bulk process."""


class _Kvtier:
    transport: Literal["shm", "tcp", "grpc"]

    def __init__(self) -> None:
        self._service: Service | None = None
        self._client: Client | None = None
        self._lease: Lease | None = None

    def start(self, directory: Path, capacity_bytes: int) -> None:
        self._service = Service(directory, capacity_bytes)
        self._service.start()

    def processes(self) -> Sequence[int]:
        assert self._service is not None
        return [self._service.pid]

    def open(self, block_bytes: int, memory: Sequence[NDArray[np.uint8]]) -> None:
        del memory
        assert self._service is not None
        if self._client is not None:
            self._client.close()
        endpoint = self._service.unix if self.transport == "shm" else self._service.tcp
        self._client = connect(endpoint, self.transport, block_bytes)
        if self.transport != "shm":
            time.sleep(_FOUND_SECONDS)

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [make_key(key, 0) for key in keys]

    def store(self, names: list[bytes], blocks: Blocks) -> None:
        granted = self._connected.store(names, blocks.views).count(StoreStatus.GRANTED)
        if granted != len(names):
            raise PeerFailed(f"{granted} of {len(names)} blocks were stored")

    def load(self, names: list[bytes], blocks: Blocks) -> None:
        loaded = self._connected.load(names, blocks.views)
        if loaded != len(names):
            raise PeerFailed(f"{loaded} of {len(names)} blocks were loaded")

    def lookup(self, names: list[bytes]) -> int:
        self._lease = self._connected.lookup(names)
        return self._lease.prefix_hits

    def settle(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def drop(self, names: list[bytes]) -> None:
        """Does nothing, because the server evicts by itself."""

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._service is not None:
            self._service.__exit__(None, None, None)

    @property
    def _connected(self) -> Client:
        assert self._client is not None
        return self._client


class Shm(_Kvtier):
    """Driver over shared memory; calls use a Unix socket."""

    transport = "shm"


class Tcp(_Kvtier):
    """Driver over plain TCP sockets, as for clients on other hosts; calls use gRPC."""

    transport = "tcp"


class Grpc(_Kvtier):
    """Driver over gRPC: bytes and calls."""

    transport = "grpc"
