"""Fakes of vLLM's objects and of the client, for tests without processes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from harness.polling import wait_until

from kvtier.client import KeyStatus, OffloadPolicy, StoreStatus
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.peers import Peers, ServerLink
from kvtier.client.engines.vllm.scheduler.prefix_lookups import LookupService, PendingLookup
from kvtier.client.engines.vllm.scheduler.requests import RequestRegistration, VllmRequest
from kvtier.client.engines.vllm.scheduler.scheduler import SchedulerSide
from kvtier.client.engines.vllm.stats import TransferCounters
from kvtier.client.engines.vllm.worker.worker import WorkerSide
from kvtier.client.handoff import EngineIdentity
from kvtier.client.offload import CacheGeometry, CacheGroup, LookupId

__all__ = [
    "FULL",
    "PAGE",
    "UNKNOWN_ADAPTER",
    "WINDOW",
    "FakeClient",
    "FakePool",
    "FakeTransfers",
    "await_namespace",
    "close_when_idle",
    "make_caches",
    "make_request",
    "make_step",
    "scheduler_side",
    "single_engine",
]

PAGE = 64
WAIT_SECONDS = 120.0
FULL = CacheGroup(0, 4, None, ("a", "b"), (PAGE, PAGE))
WINDOW = CacheGroup(1, 4, 7, ("c", "d"), (PAGE, PAGE))


UNKNOWN_ADAPTER = SimpleNamespace(lora_name="unknown", lora_int_id=1, lora_path="/nowhere")
"""A LoRA adapter whose files are not on this host."""


def make_caches(num_blocks: int) -> dict[str, torch.Tensor]:
    """Four layers in one allocation, like vLLM's; kernel blocks are half a block."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 255, (4, num_blocks * 2, PAGE // 2), generator=generator, dtype=torch.uint8)
    return dict(zip("abcd", whole.unbind(0), strict=True))


class FakePool:
    """References of blocks, like vLLM's block pool."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.num_gpu_blocks = num_blocks
        self.cached: set[bytes] = set()
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=1) for number in range(num_blocks)]

    def get_cached_block(self, block_hash: bytes, groups: Sequence[int]) -> Any:
        return [object() for _ in groups] if block_hash in self.cached else None

    def get_num_free_blocks(self) -> int:
        return sum(block.ref_cnt <= 1 for block in self.blocks) - 1  # without the null block

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1


def make_request(count: int, request_id: str = "r", **fields: Any) -> Any:
    """Returns a request with ``count`` block hashes of four tokens each."""
    fields = {
        "num_tokens": 4 * count + 1,
        "num_prompt_tokens": 4 * count + 1,
        "num_computed_tokens": 0,
        "num_output_placeholders": 0,
        "kv_transfer_params": None,
        "status": SimpleNamespace(name="FINISHED_STOPPED"),
        "lora_request": None,
        "skip_reading_prefix_cache": False,
        **fields,
    }
    hashes = [bytes([number]) * 32 for number in range(count)]
    return SimpleNamespace(request_id=request_id, block_hashes=hashes, **fields)


class Tables(dict[str, list[list[int]]]):
    """Block tables in the form of a step's output."""

    def get_block_ids(self, request_id: str) -> list[list[int]]:
        return self[request_id]


def make_step(tables: dict[str, list[list[int]]], **scheduled: int) -> Any:
    """Returns a step's output: scheduled tokens per request, and the block tables."""
    return SimpleNamespace(
        kv_connector_block_state=Tables(tables),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={},
        preempted_req_ids=set(),
    )


def single_engine(client: Any) -> dict[str, Any]:
    """Returns an identity and peers of an engine without other servers."""
    return {"identity": EngineIdentity("us", "unix:/ours", 0, 1), "peers": Peers(client, [("unix:/ours", 0)])}


@contextlib.contextmanager
def scheduler_side(
    client: FakeClient,
    world_size: int = 1,
    *,
    may_load: bool = True,
    may_save: bool = True,
    counters: TransferCounters | None = None,
    events: bool = False,
    batched_tokens: int = 0,
    connect: Callable[[str], ServerLink] | None = None,
    **settings: Any,
) -> Iterator[tuple[SchedulerSide, FakePool]]:
    """Scheduler half over one group of full attention, in an engine with an empty prefix cache.

    Timeouts are long. On exit, all queued calls have been made.
    """
    pool = FakePool()
    side = SchedulerSide(
        client,  # type: ignore[arg-type]
        CacheGeometry((FULL,), 4, 4),
        "ns",
        ConnectorConfig(lookup_timeout_s=60.0, claim_timeout_s=60.0, kv_lease_duration=3600.0, **settings),
        world_size,
        may_load=may_load,
        may_save=may_save,
        log=RateLimitedLog(),
        counters=counters,
        publish_events=events,
        batched_tokens=batched_tokens,
        connect=connect,
        **single_engine(client),
    )
    side.bind_pool(pool)
    yield side, pool
    calls, service = side._handoffs._calls, side._server
    for threads in (
        *calls._claim_threads.values(),
        *calls._notify_threads.values(),
        service._lookup_threads,
        service._control_thread,
    ):
        threads.close(WAIT_SECONDS)
    side.close()


def await_namespace(made: Any) -> None:
    """Waits until a scheduler's connector has read the model's files and is connected."""

    def is_linked() -> bool:
        made._scheduler._process_answers()
        return bool(made._scheduler._linked)

    wait_until(is_linked)


class HashedRequest(VllmRequest):
    def __init__(self, registration: RequestRegistration, hashes: dict[int, list[bytes]]) -> None:
        super().__init__(None, registration, CacheGeometry((FULL,), 4, 4), may_load=True, may_save=True)
        self._hashes = hashes

    def hashes(self, group: CacheGroup) -> Sequence[bytes]:
        return self._hashes[group.index]


_lookup_ids = map(LookupId, itertools.count(1))


def start_lookup(
    service: LookupService,
    registration: RequestRegistration,
    hashes: dict[int, list[bytes]],
    limit: int,
    *,
    start: int = 0,
    tag: bytes = b"",
) -> PendingLookup | None:
    """Starts a lookup from token `start` on. Returns None if the server cannot be called."""
    number, request = next(_lookup_ids), HashedRequest(registration, hashes)
    request.tag = tag
    started = service.start_lookup(number, request, start, limit)
    return service._lookups[number] if started else None


def reset_pending(side: SchedulerSide) -> bool:
    """Whether the server may still have blocks from before a reset."""
    resets = side._server.resets
    return resets._done != resets._started


class FakeClient:
    """Answers lookups from a set of keys, through hooks that tests replace."""

    def __init__(self, keys: set[bytes] | None = None, before: Callable[[], None] = lambda: None) -> None:
        self.connected = True
        self.epoch: int | None = 1
        self.max_keys: int | None = None
        self.begun: dict[str, Any] = {}
        self.finished: list[str] = []
        self.keys = keys or set()
        self.before = before
        self.sources: tuple[str, ...] = ()
        self.asked: list[int] = []
        self.looked_up: list[list[bytes]] = []
        self.prefixes: list[bool] = []
        self.released: list[int] = []
        self.policy = OffloadPolicy.BLOCK_LEVEL
        self.resets: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self.waits: list[float] = []

    def reset(self, *, wait: float) -> int:
        """Returns the values that the test put into `resets`, the last first; then 0."""
        answer = self.resets.pop() if self.resets else 0
        return answer() if callable(answer) else answer

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        request_id: str,
        slots: bool,
        wait: float = 0.0,
        prefix: bool = True,
        **options: Any,
    ) -> Any:
        assert slots, "workers would need a call before each copy"
        self.before()
        self.options.append(options)
        self.waits.append(wait)
        self.asked.append(len(keys))
        self.looked_up.append(list(keys))
        self.prefixes.append(prefix)
        number = len(self.asked)
        return SimpleNamespace(
            id=number,
            statuses=bytes(KeyStatus.HIT if key in self.keys else KeyStatus.MISS for key in keys),
            sources=self.sources or ("cpu",) * len(keys),
            policy=self.policy,
            votes=(),
            slots=f"slots of {number}",
            release=lambda: self.released.append(number),
        )

    def begin_request(
        self,
        request_id: str,
        keys: Sequence[bytes],
        *,
        prompt_tokens: int = 0,
        kv_transfer_params: Any,
        wait: float = 0.0,
        prefix: bool = True,
        **options: Any,
    ) -> Any:
        assert request_id not in self.begun
        self.begun[request_id] = (prompt_tokens, kv_transfer_params)
        return self.lookup(keys, request_id=request_id, wait=wait, prefix=prefix, **options)

    def finish_request(self, request_id: str) -> None:
        self.finished.append(request_id)

    def close(self) -> None:
        self.connected = False


class FakeTransfers:
    """A client whose reads and writes end as the test determines."""

    connected = True

    def __init__(self, error: Exception | None = None, max_keys: int | None = None) -> None:
        self.error = error
        self.max_keys = max_keys
        self.written: list[list[bytes]] = []
        self.slots: list[object] = []
        self.memory = memoryview(bytearray(1024))

    @contextlib.contextmanager
    def read(self, lease_id: int, items: Sequence[int], *, slots: object) -> Iterator[Any]:
        self.slots.append(slots)
        yield SimpleNamespace(memory=self.memory, offsets=[2 * PAGE * item for item in items])
        if self.error:
            raise self.error

    @contextlib.contextmanager
    def write(self, keys: Sequence[bytes], *, request_id: str) -> Iterator[Any]:
        self.written.append(list(keys))
        statuses = bytes([StoreStatus.PRESENT, StoreStatus.GRANTED, StoreStatus.NO_ROOM, StoreStatus.IN_PROGRESS])
        yield SimpleNamespace(memory=self.memory, wanted=[1], offsets=[0], statuses=statuses[: len(keys)])
        if self.error:
            raise self.error

    def wait_until_connected(self, _: float) -> None:
        pass

    def close(self) -> None:
        self.connected = False


def close_when_idle(worker: WorkerSide) -> None:
    """Closes a worker when all of its jobs have ended."""
    for threads in worker._threads or ():
        threads.close(WAIT_SECONDS)
    worker.close()
