"""Worker half of the connector: copies between the engine's KV tensors and kvtier.

Hooks run on the worker's main thread and only queue jobs. Background threads make the copies and
the remote calls. Loads, saves and the loads from each peer have a thread each, so that a load never
queues behind saves or behind a slow peer.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

from .....cuda.host.pinning import CudaRegistrar, Pin, PinError, Pinning, RefusedRegistrar, Registrar
from .... import AccessDenied, Client, InvalidRequest, KVTierError, NotConnected, StoreStatus, UnsupportedServer
from ....events import describe_blocks
from ....offload import BlockRead, CacheGroup, LoadJob, SaveJob
from ..background import BackgroundThreads, Circuit, RateLimitedLog, leave_compute_cores
from ..layout import build_layouts
from ..peers import OWN, Peers
from ..sleep import EngineAsleep, SleepGate
from ..stats import TransferCounters
from ..step_metadata import StepMetadata
from .audit import BlockAudit, Difference
from .copies import BlockCopier, make_copier
from .device_route import DeviceRoute, RouteOf, StepMark, cuda_route
from .reports import SAVE_WITHIN_S, WorkerReports

__all__ = ["WorkerSide"]

_BATCH_BYTES = 128 << 20
_CONNECT_WITHIN_S = 2.0
_SUSPEND_TIMEOUT_S = 60.0
_AUDIT_WAIT_S = 1.0
"""Longest wait for a stored block that is not in the CPU tier."""
_STORED = frozenset((StoreStatus.GRANTED, StoreStatus.PRESENT))


class WorkerSide:
    """Half of KVTierConnector in a worker. Reports every job within a bounded time.

    `pieces`: number of parts of a block that this worker holds, each with an equal share of the KV
    heads. Each part has a client of its own: `connect` gets the number of the part in this worker.
    `namespace_digest`: "" if the namespace is not known yet; see `reconnect`. `has_model`: whether
    the worker has the model of the namespace; waits for the answer for a number of seconds.
    """

    def __init__(
        self,
        connect: Callable[[int, Pin | None], Client],
        groups: Sequence[CacheGroup],
        namespace_digest: str,
        num_blocks: int,
        reports: WorkerReports,
        log: RateLimitedLog,
        counters: TransferCounters | None = None,
        *,
        stores: bool = True,
        describes: bool = True,
        peers_of: Callable[[int, Client, Pin | None], Peers] = lambda _piece, own, _pin: Peers(own),
        route_of: RouteOf | None = cuda_route,
        pieces: int = 1,
        has_model: Callable[[float], bool] = lambda _seconds: True,
    ) -> None:
        self._connect = connect
        self._has_model = has_model
        self._peers_of = peers_of
        self._pieces = pieces
        self._peers: tuple[Peers, ...] = ()
        self._route_of = route_of
        self._route: DeviceRoute | None = None
        self._stores = stores
        self._describes = describes
        self._groups = {group.index: group for group in groups}
        self._digest = namespace_digest
        self._num_blocks = num_blocks
        self._log = log
        self._clients: tuple[Client, ...] = ()
        self._pin: Pin | None = None
        self._copiers: tuple[BlockCopier, ...] = ()
        self._audit: BlockAudit | None = None
        self._threads: tuple[BackgroundThreads, BackgroundThreads] | None = None
        self._peer_load_threads: dict[str, BackgroundThreads] = {}
        self._on_start: Callable[[], None] | None = None
        self._saves_circuit = Circuit()
        self._reports = reports
        self._counters = counters or TransferCounters()
        self._gate = SleepGate()
        self.serving = False
        """Whether the engine has begun its first step. From then on it captures no CUDA graphs."""

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Creates views of the KV tensors. The first call also connects, if the namespace is known.

        Called again if the tensors are replaced. Raises Unsupported if the layout is not supported.
        """
        groups = list(self._groups.values())
        layouts = [
            build_layouts(groups, kv_caches, self._num_blocks, piece, self._pieces) for piece in range(self._pieces)
        ]
        self.suspend()
        self._copiers = tuple(map(make_copier, layouts))
        self._audit = BlockAudit(groups, kv_caches, self._num_blocks, self._pieces)
        device = self._copiers[0].device
        if self._route is not None:
            self._route.close()
        # The server copies whole pages, so it cannot copy pieces of a page.
        route_of = self._route_of if self._pieces == 1 else None
        self._route = route_of(layouts[0], device, self._log) if route_of is not None else None
        self.resume()
        if self._threads is None:
            self._pin = self._pin_for(device)
            self._on_start = leave_compute_cores if device.type == "cpu" else None
            self._threads = (
                BackgroundThreads("load", self._log, on_start=self._on_start),
                BackgroundThreads("save", self._log, on_start=self._on_start),
            )
            if self._digest:
                self._open_clients()
        self._register_route()

    def reconnect(self, namespace_digest: str) -> None:
        """Connects in a namespace: the first one, or another after a change of the weights.

        Jobs of earlier steps keep the old client, so that they store nothing in the new namespace.
        They fail when this client is closed.
        """
        if self._threads is not None:
            clients, peers = self._clients, self._peers
            self._open_clients()
            self._register_route()
            self.wait_for_server()
            threading.Thread(target=_close, args=(peers, clients), name="kvtier-close", daemon=True).start()
        self._digest = namespace_digest

    def suspend(self) -> None:
        """Refuses new copies and waits up to 60 s for running ones. Called before a sleep."""
        if not self._gate.close(_SUSPEND_TIMEOUT_S):
            self._log.warn(
                "sleep", f"a copy still runs after {_SUSPEND_TIMEOUT_S:g} s; the engine begins its sleep anyway"
            )

    def resume(self) -> None:
        self._gate.open()

    def wait_for_server(self) -> None:
        """Makes the next jobs wait briefly until the client is connected."""
        for threads in self._threads or ():
            threads.submit(functools.partial(self._await_connection, self._clients))

    def start_loads(self, step: StepMetadata) -> None:
        """Queues the step's loads behind compute that may still read the old content of the blocks.

        Raises only before the first load is queued. A queued load reports a failure itself.
        """
        if not step.loads:
            return
        if not self._usable(step):
            self._reports.refuse_loads(step)
            return
        after = self._mark(sum(bool(job.reads) for job in step.loads))
        for job in step.loads:
            self._reports.load_begun(job)
            if job.reads:
                self._load_threads_for(job.reads[0].endpoint).submit(
                    functools.partial(self._load, job, self._peers, after, time.monotonic())
                )
            else:
                self._reports.load_ended(job.request_id, failed=job.is_last)

    def start_saves(self, step: StepMetadata) -> None:
        """Queues the step's saves behind the compute that wrote the blocks (B4.11)."""
        if not step.saves:
            return
        if not self._stores:
            for job in step.saves:
                self._reports.save_ended(job.job_id)
            return
        if not self._usable(step):
            self._reports.refuse_saves(step)
            return
        assert self._threads is not None
        after = self._mark(len(step.saves))
        now = time.monotonic()
        write_until = now + SAVE_WITHIN_S - max(0.0, time.time() - step.sent_at)
        for job in step.saves:
            self._threads[1].submit(functools.partial(self._save, job, self._clients, after, now, write_until))

    def close(self) -> None:
        for threads in (*(self._threads or ()), *self._peer_load_threads.values()):
            threads.close(2.0)
        _close(self._peers, self._clients)

    def _open_clients(self) -> None:
        self._clients = tuple(self._connect(piece, self._pin) for piece in range(self._pieces))
        self._peers = tuple(self._peers_of(piece, client, self._pin) for piece, client in enumerate(self._clients))

    def _pin_for(self, device: torch.device) -> Pin | None:
        """Returns a function that pins memory for a GPU after CUDA graphs are captured (B4.16)."""
        if device.type != "cuda":
            return None
        try:
            registrar: Registrar = CudaRegistrar(device.index or 0)
        except PinError as error:  # the client logs and shows it with its downgrades
            registrar = RefusedRegistrar(error)
        return lambda memory: Pinning(memory, registrar, allowed=lambda: self.serving)

    def _register_route(self) -> None:
        """Registers the blocks before the first save, because a copy worker starts slowly."""
        route, clients = self._route, self._clients
        if route is not None and clients and self._threads is not None:
            self._threads[1].submit(functools.partial(self._await_connection, clients))
            self._threads[1].submit(lambda: route.register(clients[0]))

    def _mark(self, jobs: int) -> StepMark:
        # Only if there are jobs, because the end of the last job releases the server's event.
        by_server = self._route.mark() if self._route is not None and jobs else None
        return StepMark(self._copiers[0].mark(), by_server, jobs)

    def _usable(self, step: StepMetadata) -> bool:
        if not self._clients or self._threads is None or not self._gate.is_open:
            return False
        if step.namespace_digest != self._digest:
            self._log.warn("namespace", "scheduler and worker have different namespaces, so nothing is loaded or saved")
            return False
        return True

    def _load_threads_for(self, endpoint: str) -> BackgroundThreads:
        assert self._threads is not None
        if endpoint == OWN:
            return self._threads[0]
        if endpoint not in self._peer_load_threads:
            self._peer_load_threads[endpoint] = BackgroundThreads("load", self._log, on_start=self._on_start)
        return self._peer_load_threads[endpoint]

    # ---- on background threads

    def _await_connection(self, clients: Sequence[Client]) -> None:
        self._has_model(_CONNECT_WITHIN_S)
        with suppress(KVTierError):
            for client in clients:
                client.wait_until_connected(_CONNECT_WITHIN_S)

    def _load(self, job: LoadJob, peers: Sequence[Peers], after: StepMark, queued_at: float) -> None:
        failed = True
        try:
            for read in job.reads:
                for piece, servers in enumerate(peers):
                    self._read(read, piece, servers.client(read.endpoint), after)
            failed = False
        except (KVTierError, EngineAsleep) as error:
            self._log.warn("load", f"a load failed, so its blocks are computed: {error}")
        finally:
            after.job_ended()
            # Counted before the report: only a step collects counts, and after the report the
            # engine may take no step.
            self._counters.observe("load_seconds", time.monotonic() - queued_at)
            self._reports.load_ended(job.request_id, failed=failed)

    def _read(self, read: BlockRead, piece: int, client: Client, after: StepMark) -> None:
        if not self._has_model(0.0):
            raise NotConnected("the files of the model on this worker's host are unknown or others")
        for chunk in self._chunks(read.groups, client):
            if not self._read_by_server(client, read, chunk, after):
                self._copy_in(client, self._copiers[piece], read, chunk, after)
            self._counters.count("load_bytes", self._bytes_of(read.groups[chunk]))

    def _read_by_server(self, client: Client, read: BlockRead, chunk: slice, after: StepMark) -> bool:
        if self._route is None:
            return False
        with self._gate.copying():
            return self._route.load(client, read.lease_id, read.indices[chunk], read.block_ids[chunk], after)

    def _copy_in(self, client: Client, copier: BlockCopier, read: BlockRead, chunk: slice, after: StepMark) -> None:
        groups, block_ids = read.groups[chunk], read.block_ids[chunk]
        # The end of the `with` block checks the lease, and raises if the lease was lost.
        with client.read(read.lease_id, read.indices[chunk], slots=read.slots) as batch:
            for group, rows in _by_group(groups).items():
                offsets = [batch.offsets[row] for row in rows]
                with self._gate.copying():
                    copier.copy_in(group, [block_ids[row] for row in rows], batch.memory, offsets, after.compute)

    def _save(
        self, job: SaveJob, clients: Sequence[Client], after: StepMark, queued_at: float, write_until: float
    ) -> None:
        not_stored = set(range(len(job.keys)))
        try:
            # After a failure saves pause, so that they do not hold blocks while a server hangs.
            connected = self._has_model(0.0) and all(client.connected for client in clients)
            if connected and not self._saves_circuit.is_open:
                for chunk in self._chunks(job.groups, clients[0]):
                    if time.monotonic() >= write_until:
                        # The scheduler will soon give up the job and reuse its blocks (B5.6).
                        self._log.warn("late", "saves take minutes, so blocks are not stored")
                        break
                    # A block is stored only if all its parts are.
                    stored = [self._write(job, piece, client, chunk, after) for piece, client in enumerate(clients)]
                    not_stored.difference_update(set(stored[0]).intersection(*stored[1:]))
        except (KVTierError, EngineAsleep) as error:
            if clients is self._clients and not isinstance(error, (InvalidRequest, EngineAsleep)):
                # InvalidRequest concerns one request only.
                self._saves_circuit.open()
            self._log.warn("save", f"a save failed, so its blocks are not stored: {error}")
        finally:
            after.job_ended()
            self._counters.observe("save_seconds", time.monotonic() - queued_at)
            self._reports.save_ended(job.job_id, not_stored)

    def _write(self, job: SaveJob, piece: int, client: Client, chunk: slice, after: StepMark) -> list[int]:
        """Returns indices of the stored keys, without keys that another writer is still storing."""
        if piece == 0:
            self._describe(job, client, chunk)
        statuses = self._write_by_server(job, client, chunk, after)
        if statuses is None:
            statuses = self._copy_out(job, client, self._copiers[piece], chunk, after)
        if job.audits:
            present = [number for number, status in enumerate(statuses, chunk.start) if status == StoreStatus.PRESENT]
            self._compare(job, client, self._copiers[piece], set(present).intersection(job.audits), after)
        groups = job.groups[chunk]
        granted = [groups[index] for index, status in enumerate(statuses) if status == StoreStatus.GRANTED]
        self._counters.count("save_bytes", self._bytes_of(granted))
        return [chunk.start + index for index, status in enumerate(statuses) if status in _STORED]

    def _describe(self, job: SaveJob, client: Client, chunk: slice) -> None:
        """Tells the server the tokens of blocks if they are published. One worker is enough."""
        if not (job.contents and self._describes):
            return
        try:
            self._describes = describe_blocks(client, job.keys[chunk], job.contents[chunk])
        except (UnsupportedServer, AccessDenied) as error:
            self._describes = False
            self._log.warn("describe", f"the server does not take token ids, so events have none: {error}")
        except InvalidRequest as error:
            self._log.warn("describe", f"the server refused the token ids of blocks: {error}")

    def _write_by_server(self, job: SaveJob, client: Client, chunk: slice, after: StepMark) -> bytes | None:
        if self._route is None:
            return None
        with self._gate.copying():
            return self._route.store(client, job.keys[chunk], job.block_ids[chunk], after, job.request_id)

    def _copy_out(self, job: SaveJob, client: Client, copier: BlockCopier, chunk: slice, after: StepMark) -> bytes:
        groups, block_ids = job.groups[chunk], job.block_ids[chunk]
        with client.write(job.keys[chunk], request_id=job.request_id) as batch:
            wanted, offsets = list(batch.wanted), list(batch.offsets)
            for group, rows in _by_group([groups[index] for index in wanted]).items():
                ids = [block_ids[wanted[row]] for row in rows]
                with self._gate.copying():
                    copier.copy_out(group, ids, batch.memory, [offsets[row] for row in rows], after.compute)
        return batch.statuses

    def _compare(
        self, job: SaveJob, client: Client, copier: BlockCopier, audited: Iterable[int], after: StepMark
    ) -> None:
        """Compares blocks that the engine has computed with the blocks that the server has."""
        assert self._audit is not None
        for number in sorted(audited):
            key, group = job.keys[number], job.groups[number]
            nbytes = self._audit.nbytes(group)
            computed, stored = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
            try:
                is_there = client.load([key], [stored], wait=_AUDIT_WAIT_S) == 1
                with self._gate.copying():
                    copier.copy_out(group, [job.block_ids[number]], computed, [0], after.compute)
            except (KVTierError, EngineAsleep) as error:
                self._log.warn("audit", f"a block cannot be compared with its computation: {error}")
                continue
            found = self._audit.compare(group, computed, stored) if is_there else Difference("gone")
            self._counters.count(f"audits:{found.outcome}")
            if found.outcome == "different":
                self._log.warn(
                    "different",
                    f"the stored block {key.hex()} is not the KV that this engine computes: layer {found.layer} differs"
                    f" by {found.relative:.3g} (limit {found.limit:g}); see docs/engines.md#audit",
                )
                with suppress(KVTierError):
                    client.report_wrong([key])

    def _bytes_of(self, groups: Sequence[int]) -> int:
        return sum(self._groups[group].part_bytes for group in groups)

    def _chunks(self, groups: Sequence[int], client: Client) -> list[slice]:
        """Returns slices of at most _BATCH_BYTES and the server's maximum number of keys."""
        most = client.max_keys or len(groups)
        chunks, start, size = [], 0, 0
        for index, group in enumerate(groups):
            part_bytes = self._groups[group].part_bytes
            if index > start and (size + part_bytes > _BATCH_BYTES or index - start >= most):
                chunks.append(slice(start, index))
                start, size = index, 0
            size += part_bytes
        chunks.append(slice(start, len(groups)))
        return chunks


def _close(peers: Sequence[Peers], clients: Sequence[Client]) -> None:
    for servers in peers:
        servers.close()
    for client in clients:
        client.close()


def _by_group(groups: Sequence[int]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return rows
