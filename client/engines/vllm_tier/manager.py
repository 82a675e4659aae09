"""vLLM's hooks for a secondary tier.

vLLM's tiering manager calls one hook at a time, on the scheduler's thread or under the manager's
lock. Hooks make no remote call and do not raise. Only `drain_jobs` and `shutdown` block.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ....cuda.host.copy import address_of
from ... import Client, KVTierError, Namespace, OffloadPolicy, Timeouts
from ..failures import Unsupported, never_raises
from ..identity import InBackground, namespace_digest, with_weights_version
from ..vllm.background import BackgroundThreads, RateLimitedLog, leave_compute_cores, logger
from . import compat
from .compat import JobResult, Locality, LookupResult, RequestOffloadingContext, SecondaryTierManager
from .config import ManagerConfig
from .namespace import prepare_tier_namespace
from .tier_lookups import Answer, TierLookups, TierRequest
from .transfers import EnginePrimaryTier, Job, Transfers

__all__ = ["KVTierSecondaryTier"]

_DRAIN_SECONDS = 5.0
_START_SECONDS = 2.0
_TRANSFER_SECONDS = 10.0
# A lookup mostly waits for the server. With one thread, a burst of requests would queue.
_LOOKUP_THREADS = 8
_ANSWERS = {Answer.HIT: LookupResult.HIT, Answer.MISS: LookupResult.MISS, Answer.UNKNOWN: LookupResult.RETRY}
_POLICIES = {
    OffloadPolicy.BLOCK_LEVEL: compat.BLOCK_LEVEL,
    OffloadPolicy.REQUEST_LEVEL: compat.OffloadPolicy.REQUEST_LEVEL,
}


class KVTierSecondaryTier(SecondaryTierManager):
    """kvtier as a secondary tier of vLLM's own tiering; `settings` are those of `ManagerConfig`."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """Called while the engine starts. Raises only ValueError, for invalid settings."""
        given = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **given)
        self.log = RateLimitedLog()
        self._settings = ManagerConfig.parse(settings, logger.warning)
        self.locality = Locality(self._settings.locality) if self._settings.locality else None
        self._requests: dict[str, TierRequest] = {}
        self._to_send: dict[int, TierRequest] = {}
        self._refused: list[int] = []
        self._client: Client | None = None
        self._connecting, self._closed = threading.Lock(), False
        self._lookups: TierLookups | None = None
        self._transfers: Transfers | None = None
        self._settings.check_connection()
        try:
            self._set_up(offloading_spec.config, primary_kv_view)
        except Exception as error:  # noqa: BLE001 - the engine must start without a cache
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        if isinstance(error, Unsupported | OSError):
            logger.warning("kvtier: the tier is disabled, every request is a miss: %s", error)
        else:
            logger.warning("kvtier: the tier is disabled, its set-up failed: %r", error, exc_info=error)

    def _set_up(self, config: Any, view: memoryview) -> None:
        address, size = address_of(view, writable=True)
        primary = EnginePrimaryTier(address, size // len(view), len(view))
        engine_config = compat.find_engine_config(config.engine_id)
        settings = self._settings
        namespace_of = prepare_tier_namespace(
            config, engine_config, primary.row_bytes, tenant=settings.tenant, identity=settings.identity
        )
        engine_id = str(config.engine_id)
        InBackground(lambda: self._connect(namespace_of(), engine_id, primary), self._disable)

    def _connect(self, namespace: Namespace, engine_id: str, primary: EnginePrimaryTier) -> None:
        """Runs in the background, because the engine does not wait for digests of files."""
        settings = self._settings
        namespace = with_weights_version(namespace, settings.weights_version)
        client = Client(
            settings.endpoint,
            namespace=namespace,
            name="vllm-tiering",
            engine_id=engine_id,
            transport=settings.transport,
            timeouts=Timeouts(transfer=_TRANSFER_SECONDS),
            credentials=settings.credentials,
        )
        with contextlib.suppress(KVTierError):
            client.wait_until_connected(_START_SECONDS)
        on_start = leave_compute_cores if compat.current_platform.is_cpu() else None
        threads = functools.partial(BackgroundThreads, log=self.log, on_start=on_start)
        lookups = TierLookups(client, settings.lookup_timeout_s, self.log, threads("lookup", threads=_LOOKUP_THREADS))
        lookups.ask_policies()
        pairs = (threads("load", threads=2), threads("store", threads=2))
        transfers = Transfers(client, primary, lookups, self.log, pairs)
        with self._connecting:
            self._client, self._lookups, self._transfers = client, lookups, transfers
            closed = self._closed
        if closed:
            self._close()
        logger.info(
            "kvtier: namespace %s, rows of %d bytes, transport %s",
            namespace_digest(namespace),
            primary.row_bytes,
            client.transport,
        )

    # ---- requests

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Called first for each request. The policy is an estimate (see TierLookups.policy_of)."""
        return RequestOffloadingContext(policy=_POLICIES[self._begin(req_context)])

    @never_raises(lambda: OffloadPolicy.BLOCK_LEVEL)
    def _begin(self, req_context: Any) -> OffloadPolicy:
        if self._lookups is None:
            return OffloadPolicy.BLOCK_LEVEL
        return self._lookups.policy_of(self._request_of(req_context))

    @never_raises(lambda: LookupResult.MISS)
    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Called per key in each step that considers the request. After RETRY, vLLM asks again."""
        if self._lookups is None:
            return LookupResult.MISS
        request = self._request_of(req_context)
        answer = self._lookups.answer(request, bytes(key), compat.end_token(req_context, key))
        if request.new:
            self._to_send[id(request)] = request
        return _ANSWERS[answer]

    @never_raises()
    def on_schedule_end(self, context: Any) -> None:
        """Called at the end of each step: sends lookups, and releases hits that were not loaded.

        vLLM does not report a preempted request that runs again. The hits that such a request did
        not load stay pinned until the request or the lease ends.
        """
        if self._lookups is None:
            return
        to_send, self._to_send = self._to_send, {}
        for request in to_send.values():
            if request.new and not request.ended:
                self._lookups.send(request)
        for request_id in context.new_req_ids:
            scheduled = self._requests.get(request_id)
            if scheduled is not None:
                self._lookups.mark_scheduled(scheduled)
                if not scheduled.registration.registered:
                    self._lookups.register(scheduled.registration)

    @never_raises()
    def on_request_finished(self, req_context: Any) -> None:
        """Called once at a request's end. No new job follows, but some jobs may still run."""
        request = self._requests.pop(req_context.req_id, None)
        if self._lookups is not None and request is not None:
            self._lookups.end(request, compat.end_tokens(req_context))

    @never_raises()
    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Marks chunks as used. vLLM 0.32 and 0.33 never call it; see `on_request_finished`."""
        if self._lookups is not None:
            end_tokens = {bytes(key): compat.end_token(req_context, key) for key in keys}
            self._lookups.touch(self._request_of(req_context), end_tokens)

    # ---- jobs

    def submit_store(self, job_metadata: Any) -> None:
        """Called when chunks are in the primary tier. vLLM pins them until the job is reported."""
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Called after `lookup` answered HIT. No other job uses the rows before the report."""
        self._submit(job_metadata, load=True)

    def _submit(self, metadata: Any, *, load: bool) -> None:
        if not self._begin_job(metadata, load=load):
            # Every job must be reported. Otherwise its rows stay pinned for ever.
            self._refused.append(metadata.job_id)

    @never_raises(lambda: False)
    def _begin_job(self, metadata: Any, *, load: bool) -> bool:
        if self._transfers is None:
            return False
        request, rows = self._request_of(metadata.req_context), compat.rows_of(metadata)
        if request.registration.settings.skip_save and not load:
            return False
        # In token order, so that the start of a prefix is stored or loaded first.
        order = sorted(
            zip(map(bytes, metadata.keys), rows, strict=True),
            key=lambda pair: compat.end_token(metadata.req_context, pair[0]),
        )
        keys: Sequence[bytes] = [key for key, _ in order]
        request.used.update(keys)
        pins = [request.known.get(key) for key in keys] if load else None
        if load:
            # Until this job has ended, its keys are misses, because the job may fail.
            for key in keys:
                request.known[key] = None
        self._transfers.submit(Job(metadata.job_id, request, keys, [row for _, row in order], pins))
        request.loading += load
        return True

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Called once per step. Returns the ended jobs; for a partial load, the loaded keys."""
        refused, self._refused = self._refused, []
        results = [JobResult(number, success=False) for number in refused]
        for job in self._take_finished():
            # If one result fails, the other jobs must still be reported, to unpin their rows.
            result = self._result_of(job)
            results.append(JobResult(job.number, success=False) if result is None else result)
        return results

    @never_raises(list)
    def _take_finished(self) -> list[Job]:
        return [] if self._transfers is None else self._transfers.take_finished()

    @never_raises()
    def _result_of(self, job: Job) -> JobResult | None:
        done = JobResult(job.number, success=job.succeeded, transfer_time=job.seconds)
        if job.pins is not None and self._lookups is not None:
            done.successful_keys = tuple(job.done) if job.done and not job.succeeded else None
            for key, pin in zip(job.keys, job.pins, strict=True):
                if key in job.done:
                    # vLLM asks for this key again only if its primary tier evicts the chunk.
                    job.request.known[key] = pin
            self._lookups.loads_ended(job.request)
        return done

    @never_raises()
    def drain_jobs(self) -> None:
        """Called before vLLM empties the primary tier. After the call no job accesses rows."""
        if self._transfers is not None:
            self._transfers.drain(_DRAIN_SECONDS)

    @never_raises()
    def shutdown(self) -> None:
        """Called once at the end of the process, before the primary tier is unmapped."""
        with self._connecting:
            self._closed = True
        self._close()

    def _close(self) -> None:
        if self._transfers is not None:
            self._transfers.close(_DRAIN_SECONDS)
        if self._lookups is not None:
            self._lookups.close()
        if self._client is not None:
            self._client.close()

    def _request_of(self, req_context: Any) -> TierRequest:
        assert self._lookups is not None
        request = self._requests.get(req_context.req_id)
        if request is None:
            request = self._lookups.begin(req_context.req_id, req_context.kv_transfer_params)
            self._requests[req_context.req_id] = request
        return request


compat.check_hooks(frozenset(SecondaryTierManager.__abstractmethods__), frozenset(vars(KVTierSecondaryTier)))
