"""An engine without a model: the connector over a real server, and KV that encodes its tokens."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from connector_fakes import FULL, PAGE, WAIT_SECONDS, FakePool, make_step
from harness.polling import wait_until

from kvtier.client import Client, Group, Namespace, Timeouts
from kvtier.client.engines.identity import namespace_digest, with_weights_version
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.peers import Peers, ServerLink, address_of
from kvtier.client.engines.vllm.scheduler.scheduler import SchedulerSide
from kvtier.client.engines.vllm.stats import TransferCounters
from kvtier.client.engines.vllm.worker.reports import WorkerReports
from kvtier.client.engines.vllm.worker.worker import WorkerSide
from kvtier.client.handoff import EngineIdentity
from kvtier.client.offload import CacheGeometry

BLOCK = FULL.block_tokens
TOKEN_BYTES = PAGE // BLOCK
NAMESPACE = Namespace("toy", "uint8", (Group(2 * PAGE, BLOCK),))
BLOCKS = 64
FIRST_TURN = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}


def kv_of(tokens: Sequence[int], weights: str = "") -> bytes:
    """Returns one layer's KV; each token's depends on the weights and on all tokens before it."""
    seen, kv = hashlib.sha256(weights.encode()), bytearray()
    for token in tokens:
        seen.update(token.to_bytes(4, "big"))
        kv += seen.digest()[:TOKEN_BYTES]
    return bytes(kv)


class ToyRequest(SimpleNamespace):
    """The attributes of vLLM's requests that the connector uses."""

    def __init__(self, request_id: str, tokens: Sequence[int], params: Any, **fields: Any) -> None:
        super().__init__(
            request_id=request_id,
            all_token_ids=list(tokens),
            num_prompt_tokens=len(tokens),
            num_computed_tokens=0,
            num_output_placeholders=0,
            kv_transfer_params=params,
            lora_request=None,
            skip_reading_prefix_cache=False,
            mm_features=[],
            cache_salt=None,
            prompt_embeds=None,
            status=SimpleNamespace(name="WAITING"),
            **fields,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(BLOCK, self.num_tokens + 1, BLOCK)
        return [hashlib.sha256(repr(self.all_token_ids[:end]).encode()).digest() for end in ends]


@dataclass
class Turn:
    """Result of one request: tokens, how many were computed here, and the answer's parameters."""

    tokens: list[int]
    computed: int
    params: dict[str, Any] | None


@dataclass
class ToyEngine:
    """Runs requests one after the other, without a prefix cache of its own."""

    endpoint: str
    name: str
    config: ConnectorConfig = field(default_factory=lambda: ConnectorConfig(bidirectional_kv_xfer=True))
    may_load: bool = True
    may_save: bool = True
    weights: str = ""

    def __post_init__(self) -> None:
        # nothing is late
        self.config = replace(self.config, lookup_timeout_s=60.0, claim_timeout_s=60.0)
        self.counters, self.reports, self.pool = TransferCounters(), WorkerReports(), FakePool(BLOCKS)
        self.caches = {layer: torch.zeros(BLOCKS * PAGE, dtype=torch.uint8).view(BLOCKS, PAGE) for layer in FULL.layers}
        self._workers_version = self.config.weights_version
        link, log = self._link(self._workers_version), RateLimitedLog()
        self.scheduler = SchedulerSide(
            link.client,
            CacheGeometry((FULL,), BLOCK, BLOCK),
            namespace_digest(link.namespace),
            self.config,
            1,
            may_load=self.may_load,
            may_save=self.may_save,
            log=log,
            counters=self.counters,
            identity=EngineIdentity(self.name, *address_of(self.endpoint, self.config.advertise), 1),
            peers=link.peers,
            connect=self._link,
        )
        self.scheduler.bind_pool(self.pool)
        self.worker = WorkerSide(
            lambda *_: self._connect(self.endpoint, self._workers_version),
            [FULL],
            namespace_digest(link.namespace),
            BLOCKS,
            self.reports,
            log,
            self.counters,
            peers_of=lambda _piece, own, _pin: self._peers(own, self._workers_version),
        )
        self.worker.register(self.caches)
        self._numbers = itertools.count()
        self._blocks = itertools.cycle(range(1, BLOCKS))

    def counts(self) -> dict[str, Any]:
        """Returns the counts since the last call."""
        stats = self.counters.take()
        return dict(stats.data) if stats else {}

    def run(
        self,
        prompt: Sequence[int],
        params: Any = None,
        new_tokens: int = 0,
        *,
        end: str = "FINISHED_LENGTH_CAPPED",
        before_pull: Callable[[], None] = lambda: None,
        adapter: Any = None,
    ) -> Turn:
        """Runs a request to its end; `before_pull` is called after the match."""
        request = self.arrive(prompt, params, adapter)
        hit = self.match(request)
        before_pull()
        table = [next(self._blocks) for _ in range(-(-(len(prompt) + new_tokens) // BLOCK))]
        loaded = hit if hit and self._load(request, table, hit) else 0
        if hit and not loaded:
            hit = self.match(request)  # a request has one transfer, but may load stored blocks
            loaded = hit if hit and self._load(request, table, hit) else 0
        self.scheduler.blocks_allocated(request, [table], 0)
        self._compute(request, table, loaded, new_tokens)
        params = self.end(request, table, end)
        self.settle()
        return Turn(request.all_token_ids, request.num_computed_tokens - loaded, params)

    def arrive(self, prompt: Sequence[int], params: Any = None, adapter: Any = None) -> ToyRequest:
        request = ToyRequest(f"{self.name}-{next(self._numbers)}", prompt, params)
        request.lora_request = adapter
        self.scheduler.new_request(request)
        return request

    def match(self, request: ToyRequest) -> int:
        """Asks until the number of loadable tokens is known."""
        found: list[int] = []

        def is_known() -> bool:
            hit, _ = self.scheduler.matched_tokens(request, 0)
            found[:] = [] if hit is None else [hit]
            return hit is not None

        wait_until(is_known)
        # Like vLLM, computes the last token in any case.
        return found[0]

    def end(self, request: ToyRequest, table: Sequence[int], end: str) -> dict[str, Any] | None:
        """The request has ended; its blocks are free, except those that the connector holds."""
        request.status = SimpleNamespace(name=end)
        return self.scheduler.request_finished(request, [list(table)])

    def settle(self) -> None:
        """Steps until nothing is left to send or report, and servers know of all hand-offs."""

        def is_settled() -> bool:
            self.step()
            return not self.scheduler.has_pending_work()

        wait_until(is_settled)
        for threads in self.scheduler._handoffs._calls._notify_threads.values():
            told = threading.Event()
            threads.submit(told.set)
            assert told.wait(WAIT_SECONDS)
        assert {block.ref_cnt for block in self.pool.blocks} == {1}, "every reference was given back"

    def step(self, **scheduled: int) -> None:
        """One step of the engine with its workers, without compute."""
        step = self.scheduler.build_step(make_step(self._tables, **scheduled))
        version = self.scheduler._weights_version
        if step.namespace and version != self._workers_version:
            self._workers_version = version
            self.worker.reconnect(step.namespace_digest)
        self.worker.start_loads(step)
        self.worker.start_saves(step)
        results, report = self.reports.take_results(idle=True), self.reports.take_report()
        self.ended = set(results.finished_recving or ())
        if self.ended:
            self.scheduler.loads_reported(self.ended, results.failed_recving or ())
        self.failed = set(results.failed_recving or ())
        if report is not None:
            self.scheduler.saves_reported(report)

    def update(self, weights: str) -> None:
        """Changes the weights in place, and resets the connector as vLLM does."""
        self.weights = weights
        self.reset()

    def reset(self) -> None:
        wait_until(self.scheduler.reset)
        self.finish_reset()

    def finish_reset(self) -> None:
        """Steps until the reset has ended at the server."""

        def has_ended() -> bool:
            self.step()
            return not self.scheduler._resetting

        wait_until(has_ended)

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()

    _tables: dict[str, Any] = field(default_factory=dict)

    def _load(self, request: ToyRequest, table: list[int], hit: int) -> bool:
        """Waits for a load; returns whether it succeeded."""
        self.scheduler.blocks_allocated(request, [table], hit)
        request.num_computed_tokens = hit

        def has_ended() -> bool:
            self.step()
            return request.request_id in self.ended

        wait_until(has_ended)
        if request.request_id in self.failed:
            request.num_computed_tokens = 0
            return False
        return True

    def _compute(self, request: ToyRequest, table: list[int], start: int, new_tokens: int) -> None:
        weights = self.weights + (request.lora_request.weights if request.lora_request is not None else "")
        kv = kv_of(request.all_token_ids[:start], weights)
        assert self._read(table)[: len(kv)] == kv, "tokens would be computed from wrong KV"
        for _ in range(new_tokens):
            request.all_token_ids.append(hashlib.sha256(repr(request.all_token_ids).encode()).digest()[0])
        computed = len(request.all_token_ids) - (1 if new_tokens else 0)
        self._write(table, kv_of(request.all_token_ids[:computed], weights))
        self._tables = {request.request_id: [table]}
        self.step(**{request.request_id: computed - start})
        request.num_computed_tokens = computed

    def _read(self, table: list[int]) -> bytes:
        layers = [b"".join(bytes(self.caches[layer][block].tolist()) for block in table) for layer in FULL.layers]
        assert layers[0] == layers[1]
        return layers[0]

    def _write(self, table: list[int], kv: bytes) -> None:
        padded = kv + bytes(-len(kv) % PAGE)
        for number in range(len(padded) // PAGE):
            page = torch.tensor(list(padded[number * PAGE : (number + 1) * PAGE]), dtype=torch.uint8)
            for layer in FULL.layers:
                self.caches[layer][table[number]] = page

    def _link(self, version: str) -> ServerLink:
        own = self._connect(self.endpoint, version)
        return ServerLink(version, with_weights_version(NAMESPACE, version), own, self._peers(own, version))

    def _connect(self, endpoint: str, version: str) -> Client:
        namespace, timeouts = with_weights_version(NAMESPACE, version), Timeouts(connect=60, call=60)
        client = Client(endpoint, namespace=namespace, engine_id=self.name, timeouts=timeouts)
        client.wait_until_connected()
        return client

    def _peers(self, own: Client, version: str) -> Peers:
        addresses = [address_of(self.endpoint), address_of(self.endpoint, self.config.advertise)]
        return Peers(own, addresses, self.config.peers, lambda endpoint: self._connect(endpoint, version))
