"""The server as a whole: what is started, in which order, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
from grpc_health.v1.health import SERVICE_NAME
from grpc_reflection.v1alpha import reflection

from ..cuda.host.memory import tune_malloc
from ..cuda.host.numa import choose_nodes, memory_nodes, read_placement
from ..cuda.host.region import PAGE_BYTES, HostRegion, RegionError
from ..protos.endpoint import Endpoint, default_endpoint
from ..protos.v1 import admin_pb2_grpc, cache_pb2_grpc, handoff_pb2_grpc, session_pb2_grpc
from ..tiers.base import TierError
from .access import AccessControl, AccessError
from .bulk.broker import BulkBroker
from .bulk.supervisor import BulkProcess
from .config.machine import allow_descriptors
from .config.schema import Config
from .config.tenants import keeping_of, why_refused
from .devices.registry import DeviceRegistry, unavailable_reason
from .drain import Drain
from .process.gc_tuning import FullCollector, disable_full_gc
from .process.systemd import ServiceManager
from .rpc.attach import AttachServer
from .rpc.interceptor import RefusalInterceptor
from .rpc.request_checks import RequestValidator
from .rpc.sessions import SessionRegistry
from .rpc.socket_calls import SocketCallServer
from .rpc.sockets import SocketClaim, SocketError, trouble_with_port
from .rpc.writers import Writers
from .runtime import TierRuntime
from .services.admin import AdminService
from .services.cache import CacheService
from .services.devices import DeviceCopyCalls, add_device_calls
from .services.handoff import HandoffService
from .services.session import SessionService
from .services.status_builder import StatusBuilder
from .services.transfer import TransferService
from .telemetry.health import Health
from .telemetry.http import MetricsServer, MetricsServerError, on_loop
from .telemetry.logs import get_logger
from .telemetry.loop_lag import LoopLag, watch_loop
from .telemetry.metrics import Metrics, ServerStats
from .telemetry.status_page import StatusPage
from .telemetry.tracing import Tracing, TracingError, open_tracing
from .tier_host.factory import open_tiers

__all__ = ["EXIT_LEFT_BEHIND", "Server", "StartError", "serve"]

EXIT_LEFT_BEHIND = 3
"""The server has ended, and a tier has not: what that one was doing is lost, as if the process had been killed."""

_log = get_logger(__name__)

_SERVICES = ("SessionService", "CacheService", "TransferService", "HandoffService", "AdminService")
_GRACE_SECONDS = 1.0
_HEALTH_SECONDS = 1.0
_MESSAGE_OVERHEAD_BYTES = 64 << 10


class StartError(Exception):
    """The server cannot start; the message is one line for people."""


def serve(config: Config) -> int:
    """Runs a server until SIGTERM or SIGINT; returns the exit code of the process.

    After `EXIT_LEFT_BEHIND` threads may still be at work on the region: the process must end without more ado (`os._exit`).
    """
    tune_malloc()
    allow_descriptors()
    # A copy on a worker thread takes back the GIL after each block; with the default of 5 ms, one busy
    # thread beside it cuts its rate to a hundredth.
    sys.setswitchinterval(1e-4)
    try:
        return asyncio.run(_serve(config))
    except StartError as error:
        _log.error("cannot start", reason=str(error))
        return 1


async def _serve(config: Config) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = Server(config, stop.set)
    manager = ServiceManager()
    try:
        await server.start()
        manager.ready()
        await stop.wait()
    finally:
        manager.stopping()
        await server.stop()
        manager.close()
    return EXIT_LEFT_BEHIND if server.left_behind else 0


class Server:
    """One server: `start`, then `stop`, on the same event loop."""

    def __init__(self, config: Config, end: Callable[[], object] = lambda: None) -> None:
        """`end` is called when somebody asks the server to end: who started it stops it then."""
        self.config = config
        self._end = end
        self.ports: list[int] = []
        """The TCP ports that it listens on; of interest where the configuration said 0."""
        self.metrics_port: int | None = None
        self.left_behind: list[str] = []
        """The tiers that did not come to an end with the server."""
        self._closers = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Opens everything and begins to serve.

        Raises:
            StartError: something that it needs cannot be had; nothing stays behind after `stop`.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        with _start_errors():
            trust = AccessControl(self.config)
        claims = self._claim_sockets()
        runtime = await self._open_runtime()
        sessions = SessionRegistry(runtime, self.config.limits.max_sessions, trust.meters)
        metrics = Metrics(on_loop(loop, _snapshot_of(runtime, sessions, started)))
        metrics.expect_tiers(tier.name for tier in runtime.tiers)
        tracing = self._open_tracing(sessions.epoch)
        runtime.observe_jobs(metrics.observe_job if tracing is None else tracing.beside(metrics.observe_job))
        runtime.observe_failures(metrics.failed)
        interceptor = RefusalInterceptor(
            metrics.observe_rpc, metrics.refused, tracing, gate=trust.gate, auditor=trust.audit
        )
        calls = SocketCallServer(interceptor, self._max_message_bytes)
        attach = AttachServer(_attach_path(claims), runtime.region.fd, runtime.region.size_bytes, sessions, calls)
        with _start_errors():
            attach.start()
        self._closers.push_async_callback(attach.close)
        server = self._make_server(interceptor)
        drainage, lateness = Drain(runtime, sessions, self._end), LoopLag()
        overview = StatusBuilder(runtime, sessions, started, lateness)
        admin = AdminService(runtime, sessions, overview, drainage)
        self._add_services(server, calls, runtime, sessions, attach, metrics, trust, admin)
        health = Health([f"kvtier.v1.{name}" for name in _SERVICES])
        await health.register(server)
        self._listen(server, trust)
        self._start_metrics(loop, drainage, metrics, overview, trust)
        disable_full_gc()  # anew, with what the tiers have found on their disks
        # The first pages are there before the first call is.
        await runtime.start()
        await server.start()
        self._closers.push_async_callback(server.stop, _GRACE_SECONDS)
        self._closers.push_async_callback(drainage.finish)
        for claim in claims:
            claim.restrict()
        await health.update(runtime.stats())
        for watch in (
            _watch(runtime, health, metrics, lambda: trust.look_again(sessions)),
            watch_loop(metrics.loop_lag.observe, lateness.observe),
        ):
            self._closers.callback(loop.create_task(watch).cancel)
        self._closers.push_async_callback(health.shut_down)
        _log.info(
            "ready",
            listen=list(self.config.listen),
            ports=self.ports,
            metrics_port=self.metrics_port,
            region_bytes=runtime.region.size_bytes,
            tiers=[tier.name for tier in runtime.stats().tiers],
            epoch=f"{sessions.epoch:016x}",
            seconds=round(loop.time() - started, 3),
        )

    async def stop(self) -> None:
        """Takes no new work, waits for what is under way, and leaves nothing behind. After a failed `start` as well."""
        await self._closers.aclose()
        if self.left_behind:
            _log.error("stopped, and tiers were left behind", tiers=self.left_behind, exit_code=EXIT_LEFT_BEHIND)
        else:
            _log.info("stopped")

    def _open_tracing(self, epoch: int) -> Tracing | None:
        with _start_errors():
            tracing = open_tracing(self.config.tracing, epoch)
        if tracing is not None:
            self._closers.push_async_callback(asyncio.to_thread, tracing.close)
        return tracing

    def _claim_sockets(self) -> list[SocketClaim]:
        claims = []
        for endpoint in self.config.endpoints:
            if endpoint.is_unix:
                with _start_errors():
                    claim = SocketClaim(endpoint)
                self._closers.callback(claim.release)
                claims.append(claim)
        if not claims:
            # TCP only: clients on this host still attach through a socket, beside the default one.
            path = Path(default_endpoint().path or "")
            with _start_errors():
                claim = SocketClaim(Endpoint(path=str(path.with_name(f"tcp-{os.getpid()}.sock"))))
            self._closers.callback(claim.release)
            claims.append(claim)
        return claims

    async def _open_runtime(self) -> TierRuntime:
        region_bytes = self.config.region_size // PAGE_BYTES * PAGE_BYTES
        with _start_errors():
            # On a thread: looking through a large store takes seconds, and signals are to be heard meanwhile.
            tiers = await asyncio.to_thread(open_tiers, self.config.tiers)
        with contextlib.ExitStack() as opened:
            for tier in tiers:
                opened.callback(tier.close)
            with _start_errors():
                region = HostRegion.create(region_bytes)
            opened.callback(region.close)
            try:
                region.nodes = self._memory_nodes()
                keeping = keeping_of(self.config, region_bytes, tiers)
                runtime = TierRuntime(region, tiers, keeping, stall_seconds=self.config.limits.tier_stall)
            except ValueError as error:
                raise StartError(why_refused(error)) from error
            opened.pop_all()  # they are the runtime's from here on
        self._closers.push_async_callback(self._close_runtime, runtime)
        return runtime

    def _memory_nodes(self) -> tuple[int, ...]:
        try:
            return choose_nodes(read_placement(self.config.numa), memory_nodes())
        except ValueError as error:
            raise ValueError(f"numa = {self.config.numa}: {error}") from None

    async def _close_runtime(self, runtime: TierRuntime) -> None:
        await runtime.close()
        self.left_behind = runtime.left_behind

    @property
    def _max_message_bytes(self) -> int:
        return self.config.limits.max_message_bytes + _MESSAGE_OVERHEAD_BYTES

    def _make_server(self, interceptor: RefusalInterceptor) -> grpc.aio.Server:
        return grpc.aio.server(
            interceptors=[interceptor],
            options=[
                ("grpc.max_receive_message_length", self._max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                # A peer that vanished without a word (its host is gone) is noticed within 15 s.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                # Who connects and says nothing, or has nothing to say any more, is hung up on.
                ("grpc.server_handshake_timeout_ms", 5_000),
                ("grpc.max_connection_idle_ms", 300_000),
                ("grpc.max_concurrent_streams", 256),
            ],
        )

    def _add_services(
        self,
        server: grpc.aio.Server,
        calls: SocketCallServer,
        runtime: TierRuntime,
        sessions: SessionRegistry,
        attach: AttachServer,
        metrics: Metrics,
        trust: AccessControl,
        admin: AdminService,
    ) -> None:
        """Registers all services with gRPC, and those with unary calls for clients on this host as well."""
        edge = RequestValidator(self.config.limits, self.config.leases, self.config.retention, self.config.handoff)
        writers = Writers(runtime)
        devices = self._make_devices(runtime, sessions, writers)
        session = SessionService(self.config, runtime, sessions, attach.path, devices.capabilities)
        session_pb2_grpc.add_SessionServiceServicer_to_server(session, server)
        desk = BulkBroker(runtime, sessions, edge, metrics, writers, trust.authority, trust.audit)
        bulk = self._make_bulk(desk, runtime, sessions, attach)
        cache = CacheService(runtime, sessions, edge, bulk.quiet)
        handoff = HandoffService(runtime, sessions, edge)
        for registry in (server, calls):
            cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, registry)
            handoff_pb2_grpc.add_HandoffServiceServicer_to_server(handoff, registry)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, registry)
            add_device_calls(DeviceCopyCalls(runtime, sessions, edge, metrics, devices), registry)
        transfer = TransferService(runtime, sessions, edge, metrics, bulk)
        server.add_generic_rpc_handlers((transfer.handler(),))
        transfer.add_calls(calls)
        names = [f"kvtier.v1.{name}" for name in _SERVICES]
        reflection.enable_server_reflection([*names, SERVICE_NAME, reflection.SERVICE_NAME], server)

    def _make_bulk(
        self, desk: BulkBroker, runtime: TierRuntime, sessions: SessionRegistry, attach: AttachServer
    ) -> BulkProcess:
        sessions.on_close.append(desk.session_fell)
        bulk = BulkProcess(runtime.region, self.config, desk, attach.take_calls)
        self._closers.push_async_callback(bulk.close)
        return bulk

    def _make_devices(self, runtime: TierRuntime, sessions: SessionRegistry, writers: Writers) -> DeviceRegistry:
        driver = self.config.devices.driver
        devices = DeviceRegistry(runtime, sessions, writers, driver=driver, unavailable=unavailable_reason(driver))
        self._closers.push_async_callback(devices.close)
        if devices.unavailable:
            _log.info("engines' devices are not served", reason=devices.unavailable)
        return devices

    def _listen(self, server: grpc.aio.Server, trust: AccessControl) -> None:
        for endpoint in self.config.endpoints:
            credentials = None if endpoint.is_unix else trust.credentials
            try:
                if credentials is None:
                    port = server.add_insecure_port(endpoint.target)
                else:
                    port = server.add_secure_port(endpoint.target, credentials)
            except RuntimeError as error:
                # gRPC does not say: another address than this host's, a name that nobody knows, a port that is taken.
                trouble = None if endpoint.is_unix else trouble_with_port(endpoint)
                otherwise = (
                    "is the port in use?" if credentials is None else "gRPC cannot use the certificate or its key"
                )
                raise StartError(
                    f"cannot listen on {endpoint}: {trouble.strerror if trouble else otherwise}"
                ) from error
            if not endpoint.is_unix:
                self.ports.append(port)

    def _start_metrics(
        self,
        loop: asyncio.AbstractEventLoop,
        drainage: Drain,
        metrics: Metrics,
        overview: StatusBuilder,
        trust: AccessControl,
    ) -> None:
        if self.config.metrics is None:
            return
        with _start_errors():
            # Neither a tier in trouble nor a server that was drained to stay is to be restarted; a loop that does not answer is.
            trouble = on_loop(loop, lambda: "draining" if drainage.ending else None)
            server = MetricsServer(
                self.config.metrics,
                metrics.registry,
                trouble,
                trust.may_see_metrics,
                page=StatusPage(on_loop(loop, overview.status)),
            )
        self.metrics_port = server.port
        self._closers.push_async_callback(asyncio.to_thread, server.close)


async def _watch(
    runtime: TierRuntime, health: Health, metrics: Metrics, look_again: Callable[[], object] = lambda: None
) -> None:
    garbage = FullCollector(runtime.now())
    while True:
        await asyncio.sleep(_HEALTH_SECONDS)
        try:
            look_again()
            await health.update(runtime.stats())
            garbage.tick(runtime.now(), metrics.calls)
        except Exception as error:  # noqa: BLE001 - without it no token would ever be taken away again
            metrics.failed("watch")
            _log.error("watch failed", exc_info=error)


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    try:
        yield
    except (SocketError, TierError, RegionError, MetricsServerError, TracingError, AccessError, OSError) as error:
        raise StartError(str(error)) from error


def _attach_path(claims: list[SocketClaim]) -> Path:
    return claims[0].path.with_name(claims[0].path.name + ".shm")


def _snapshot_of(runtime: TierRuntime, sessions: SessionRegistry, started: float) -> Callable[[], ServerStats]:
    def snapshot() -> ServerStats:
        stats = runtime.stats()
        return ServerStats(
            manager=stats,
            epoch=sessions.epoch,
            uptime_seconds=runtime.now() - started,
            region_bytes=runtime.region.size_bytes,
            region_backed_bytes=runtime.region.backed_bytes,
            sessions_by_transport=Counter(session.transport for session in sessions.all()),
            draining=sessions.draining,
            sessions_attached=sum(bool(session.attachments) for session in sessions.all()),
            sessions_limit=sessions.limit,
            sessions_opened=sessions.opened,
            sessions_closed=sessions.opened - len(sessions.all()),
            namespaces=runtime.core.namespace_stats(),
            models=sessions.models,
        )

    return snapshot
