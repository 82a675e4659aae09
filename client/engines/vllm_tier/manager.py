"""vLLM's hooks for a secondary tier, and what is behind each of them.

All of them are called by vLLM's tiering manager, one at a time, on the scheduler's thread (later versions: or under a lock that it
waits for). None of them calls the server, none blocks but ``drain_jobs`` and ``shutdown``, and none raises: an exception here ends
the engine.
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ....cuda.host.copy import address_of
from ... import Client, InvalidRequest, KVTierError, Namespace, OffloadPolicy, Timeouts
from ..vllm.background import BackgroundThreads, LimitedLog, leave_compute_cores, logger
from ..vllm.config import ServerConfig
from ..vllm.groups import Unsupported
from ..vllm.hooks import never_raises, nothing
from ..vllm.namespace import namespace_digest
from . import compat
from .compat import JobResult, Locality, LookupResult, RequestOffloadingContext, SecondaryTierManager
from .tier_lookups import Answer, TierLookups, TierRequest
from .tier_namespace import build_tier_namespace
from .transfers import EnginePrimaryTier, Job, Transfers

__all__ = ["KVTierSecondaryTier", "ManagerConfig"]


_START_SECONDS = 2.0


_DRAIN_SECONDS = 5.0


_TRANSFER_SECONDS = 10.0


# They only wait: a burst of requests is not to queue behind the few that came first.
_LOOKUP_THREADS = 8


_ANSWERS = {Answer.HIT: LookupResult.HIT, Answer.MISS: LookupResult.MISS, Answer.UNKNOWN: LookupResult.RETRY}


_POLICIES = {
    OffloadPolicy.BLOCK_LEVEL: compat.BLOCK_LEVEL,
    OffloadPolicy.REQUEST_LEVEL: compat.OffloadPolicy.REQUEST_LEVEL,
}


def _miss() -> Any:
    return LookupResult.MISS


def _no_jobs() -> list[Job]:
    return []


def _no_result() -> JobResult | None:
    return None


class KVTierSecondaryTier(SecondaryTierManager):
    """kvtier as a secondary tier of vLLM's own tiering."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """Called once, in the scheduler's process, while the engine starts. ``settings``: see TierConfig.

        Raises ValueError for settings that are wrong, a typo in the endpoint included; for nothing else.
        """
        given = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **given)
        self.log = LimitedLog()
        self._settings = ManagerConfig.parse(settings, logger.warning)
        self.locality = Locality(self._settings.locality) if self._settings.locality else None
        self._requests: dict[str, TierRequest] = {}
        self._asking: dict[int, TierRequest] = {}
        # Jobs that could not even begin, or were not to.
        self._refused: list[int] = []
        self._client: Client | None = None
        self._lookups: TierLookups | None = None
        self._transfers: Transfers | None = None
        try:
            self._set_up(offloading_spec.config, primary_kv_view)
        except Unsupported as reason:
            logger.warning("kvtier: the tier is disabled, every request is a miss: %s", reason)
        except InvalidRequest as error:
            raise ValueError(f"kvtier: {error}") from error
        except Exception as error:  # noqa: BLE001 - a cache that cannot start must not keep the engine from starting
            logger.warning("kvtier: the tier is disabled, its set-up failed: %r", error, exc_info=True)

    def _set_up(self, config: Any, view: memoryview) -> None:
        address, size = address_of(view, writable=True)
        primary = EnginePrimaryTier(address, size // len(view), len(view))
        engine_config = compat.find_engine_config(config.engine_id)
        settings = self._settings
        namespace = build_tier_namespace(
            config, engine_config, primary.row_bytes, tenant=settings.tenant, identity=settings.identity
        )
        self._client = client = self._connect(config, namespace)
        on_start = leave_compute_cores if compat.on_cpu() else None
        threads = functools.partial(BackgroundThreads, log=self.log, on_start=on_start)
        self._lookups = TierLookups(
            client, settings.lookup_timeout_s, self.log, threads("lookup", threads=_LOOKUP_THREADS)
        )
        self._transfers = Transfers(
            client, primary, self._lookups, self.log, (threads("load", threads=2), threads("store", threads=2))
        )
        logger.info(
            "kvtier: namespace %s, rows of %d bytes, transport %s",
            namespace_digest(namespace),
            primary.row_bytes,
            client.transport,
        )

    def _connect(self, config: Any, namespace: Namespace) -> Client:
        client = Client(
            self._settings.endpoint,
            namespace=namespace,
            name="vllm-tiering",
            engine_id=str(config.engine_id),
            transport=self._settings.transport,
            timeouts=Timeouts(transfer=_TRANSFER_SECONDS),
            credentials=self._settings.credentials,
        )
        try:
            # Requests may come right away, and the start of an engine takes half a minute anyway.
            client.wait_until_connected(_START_SECONDS)
        except KVTierError as error:
            logger.warning("kvtier: no server yet, the engine starts without: %s", error)
        return client

    # ---- a request's life

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Called when a request comes, before anything else about it. Its policy is known by experience: see ``policy_of``."""
        return RequestOffloadingContext(policy=_POLICIES[self._begin(req_context)])

    @never_raises(lambda: OffloadPolicy.BLOCK_LEVEL)
    def _begin(self, req_context: Any) -> OffloadPolicy:
        if self._lookups is None:
            return OffloadPolicy.BLOCK_LEVEL
        return self._lookups.policy_of(self._request_of(req_context))

    @never_raises(_miss)
    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Called for one key after the other, in each step in which the request is considered; RETRY means: in the next step."""
        if self._lookups is None:
            return LookupResult.MISS
        request = self._request_of(req_context)
        answer = self._lookups.answer(request, bytes(key), compat.end_token(req_context, key))
        if request.new:
            self._asking[id(request)] = request
        return _ANSWERS[answer]

    @never_raises(nothing)
    def on_schedule_end(self, context: Any) -> None:
        """Called at the end of each step: look-ups leave; what requests that run now did not load is given back.

        vLLM does not say which preempted requests run again: what those did not load is pinned until they end or the lease does.
        """
        if self._lookups is None:
            return
        asking, self._asking = self._asking, {}
        for request in asking.values():
            if request.new and not request.ended:
                self._lookups.send(request)
        for request_id in context.new_req_ids:
            scheduled = self._requests.get(request_id)
            if scheduled is not None:
                self._lookups.settle(scheduled)
                if not scheduled.announcement.begun:
                    self._lookups.announce(scheduled.announcement)

    @never_raises(nothing)
    def on_request_finished(self, req_context: Any) -> None:
        """Called once at a request's end, however it came; no job of it is submitted after that, but some may still run."""
        request = self._requests.pop(req_context.req_id, None)
        if self._lookups is not None and request is not None:
            self._lookups.end(request)

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Called with keys that the engine uses, most of which it has itself. The server orders its blocks by its own look-ups."""

    # ---- jobs

    def submit_store(self, job_metadata: Any) -> None:
        """Called when chunks are in the primary tier, pinned there until the job is reported."""
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Called at the end of the step in which ``lookup`` answered HIT, with rows that are the job's until it is reported."""
        self._submit(job_metadata, load=True)

    def _submit(self, metadata: Any, *, load: bool) -> None:
        if not self._begin_job(metadata, load=load):
            # A job that is neither begun nor reported would pin its rows for ever.
            self._refused.append(metadata.job_id)

    @never_raises(lambda: False)
    def _begin_job(self, metadata: Any, *, load: bool) -> bool:
        if self._transfers is None:
            return False
        request, rows = self._request_of(metadata.req_context), compat.rows_of(metadata)
        if request.announcement.settings.skip_save and not load:
            return False
        # In the order of the request's tokens: what a prefix begins with is stored, and read, first.
        order = sorted(
            zip(map(bytes, metadata.keys), rows, strict=True),
            key=lambda pair: compat.end_token(metadata.req_context, pair[0]),
        )
        keys: Sequence[bytes] = [key for key, _ in order]
        pins = [request.known.get(key) for key in keys] if load else None
        if load:
            # None of them is a hit again before this one has ended, and it may not even begin.
            for key in keys:
                request.known[key] = None
        self._transfers.submit(Job(metadata.job_id, request, keys, [row for _, row in order], pins))
        request.loading += load
        return True

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Called once per step: each job is reported once, partly failed loads with the keys that did arrive (B3.18)."""
        refused, self._refused = self._refused, []
        results = [JobResult(number, success=False) for number in refused]
        for job in self._take_finished():
            # Each by itself: a job that is taken and not reported pins its rows for ever.
            result = self._result_of(job)
            results.append(JobResult(job.number, success=False) if result is None else result)
        return results

    @never_raises(_no_jobs)
    def _take_finished(self) -> list[Job]:
        return [] if self._transfers is None else self._transfers.take_finished()

    @never_raises(_no_result)
    def _result_of(self, job: Job) -> JobResult | None:
        done = JobResult(job.number, success=job.succeeded, transfer_time=job.seconds)
        if job.pins is not None and self._lookups is not None:
            done.successful_keys = tuple(job.done) if job.done and not job.succeeded else None
            for key, pin in zip(job.keys, job.pins, strict=True):
                if key in job.done:
                    # vLLM has it in its primary tier, and asks for it again only if that has to evict it.
                    job.request.known[key] = pin
            self._lookups.loads_ended(job.request)
        return done

    @never_raises(nothing)
    def drain_jobs(self) -> None:
        """Called between steps before the primary tier is emptied: afterwards nothing reads or writes its rows. In bounded time."""
        if self._transfers is not None:
            self._transfers.drain(_DRAIN_SECONDS)

    @never_raises(nothing)
    def shutdown(self) -> None:
        """Called once at the end of the process, before the primary tier is unmapped."""
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


_LOCALITIES = (None, "LOCAL", "REMOTE")


@dataclass(frozen=True)
class ManagerConfig(ServerConfig):
    """The tier's settings, besides those of every way to kvtier.

    ``identity``: a name for these weights and settings, part of the namespace; wanted where the tier cannot see the engine's
    configuration (it says so at start), and otherwise a way to keep engines apart. Where it is wanted it also vouches for what then
    cannot be checked: block hashes that are the same in every process (``--prefix-caching-hash-algo sha256``), and no LoRA.
    ``locality``: vLLM's word for where this tier is, ``LOCAL`` or ``REMOTE``; requests can leave tiers out by it.
    """

    where: ClassVar[str] = "the tier's table in secondary_tiers"

    identity: str = ""
    locality: str | None = None

    def check(self) -> None:
        """Raises ValueError for a value that cannot be."""
        super().check()
        if not isinstance(self.identity, str):
            raise ValueError(f"kvtier: identity must be a string, not {self.identity!r}")  # noqa: TRY004 - one kind for all
        if self.locality not in _LOCALITIES:
            raise ValueError(f"kvtier: locality must be LOCAL or REMOTE, not {self.locality!r}")
