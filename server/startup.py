"""Start-up stages of the server, in the order in which `Server.start` runs them.

Each stage gets results of earlier stages as arguments, and registers with `closers` the functions
that close what the stage opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1.health import SERVICE_NAME
from grpc_reflection.v1alpha import reflection

from ..cuda.host.numa import choose_nodes, memory_nodes, read_placement
from ..cuda.host.region import PAGE_BYTES, RegionError
from ..protos.endpoint import Endpoint, default_endpoint, parse_endpoint
from ..protos.peer_directory import PeerDirectory
from ..protos.v1 import (
    admin_pb2_grpc,
    cache_pb2_grpc,
    conversation_pb2_grpc,
    events_pb2_grpc,
    handoff_pb2_grpc,
    session_pb2_grpc,
)
from ..protos.wire.request_bounds import RequestBounds
from ..tiers.secondary_tier import SecondaryTier, TierError
from .auth.authenticator import AccessControl, AccessError
from .auth.credential_files import FileError
from .bulk.broker import BulkBroker
from .bulk.supervisor import BulkProcess, bind_streams
from .config.machine import max_grpc_connections
from .config.schema import Config
from .config.tenants import quota_error_text, tenants_of, tier_settings
from .core_runtime import TierRuntime
from .devices.registry import DeviceRegistry, has_gpu, unavailable_reason
from .drain import Drain
from .events.publisher import EventPublisher
from .events.reader_process import ReaderProcess
from .events.reader_sockets import PublisherError
from .memory_pools import with_pools
from .peers.peer_tier import PeerTier
from .peers.sources import PeerSources, peer_credentials
from .rpc.attach_socket import SUFFIX, AttachServer
from .rpc.call_rules import CallRules
from .rpc.grpc_batches import free_all_batches
from .rpc.interceptor import RefusalInterceptor
from .rpc.listening_sockets import SocketClaim, SocketError, port_error
from .rpc.own_copies import Writers
from .rpc.request_checks import RefusingBounds, RequestValidator
from .rpc.sessions import SessionRegistry
from .rpc.slice_scheduler import SliceScheduler
from .rpc.socket_calls import SocketCallServer
from .services.admin import AdminService
from .services.admin_messages import server_stats
from .services.cache import CacheService
from .services.conversation_calls import ConversationService
from .services.devices import DeviceCopyCalls, add_device_calls
from .services.events import EventService
from .services.handoff import HandoffService
from .services.long_calls import LongCalls
from .services.session import SessionService
from .services.transfer import TransferService
from .telemetry.downgrades import Downgrades
from .telemetry.grpc_health import Health
from .telemetry.http import MetricsServer, MetricsServerError, OnceASecond, on_loop
from .telemetry.logs import get_logger
from .telemetry.metrics import Metrics
from .telemetry.status_page import AsyncStatus, StatusPage, read_on_loop
from .telemetry.tracing import Tracing, TracingError, open_tracing
from .tier_host.factory import open_on_thread, share_region
from .warm_restart import open_memory

__all__ = [
    "Backend",
    "Listeners",
    "StartError",
    "add_services",
    "bind_endpoints",
    "claim_sockets",
    "load_access_control",
    "make_peer_tier",
    "open_listeners",
    "open_runtime",
    "open_telemetry",
    "register_health",
    "start_metrics_server",
    "start_publisher",
]

_log = get_logger(__name__)

_SERVICES = [
    f"kvtier.v1.{name}"
    for name in (
        "SessionService",
        "CacheService",
        "TransferService",
        "HandoffService",
        "EventService",
        "ConversationService",
        "AdminService",
    )
]
_MESSAGE_OVERHEAD_BYTES = 64 << 10
_GRPC_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    # Detect within 15 s that the host of a peer has failed.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Close connections that complete no handshake, and idle connections.
    ("grpc.server_handshake_timeout_ms", 5_000),
    # Until a client confirms the settings, gRPC (1.85) accepts 16 MiB of headers, then 16 KiB.
    ("grpc.http2.settings_timeout", 5_000),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.max_concurrent_streams", 256),
    # By default gRPC cancels calls at random if more than 1,000 wait until the server accepts them:
    # a burst of one tenant cancelled a fifth of the calls of another one.
    ("grpc.server.max_pending_requests", 4_096),
    ("grpc.server.max_pending_requests_hard_limit", 4_096),
    # Otherwise each stream may get megabytes before its call asks for them: see `InFlightLimiter`.
    ("grpc.http2.bdp_probe", 0),
]


class StartError(Exception):
    """The server cannot start; the message is one line for the operator."""


_ERRORS = SocketError, TierError, RegionError, MetricsServerError, TracingError, AccessError, FileError, PublisherError


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    try:
        yield
    except (*_ERRORS, OSError) as error:
        raise StartError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Backend:
    config: Config
    runtime: TierRuntime
    sessions: SessionRegistry
    access: AccessControl
    metrics: Metrics
    peers: PeerTier | None = None


@dataclass(frozen=True, slots=True)
class Listeners:
    """Listeners for calls: gRPC, unary calls over sockets, and the region's attach socket.

    `turns` grants turns to the calls of all listeners.
    """

    grpc: grpc.aio.Server
    socket_calls: SocketCallServer
    attach: AttachServer
    turns: SliceScheduler


def load_access_control(config: Config, downgrades: Downgrades) -> AccessControl:
    with _start_errors():
        return AccessControl(config, downgrades)


def claim_sockets(config: Config, closers: AsyncExitStack) -> list[SocketClaim]:
    """Locks the path of each configured Unix socket; with TCP only, locks one default path.

    The attach socket is created next to the first of these paths.
    """
    endpoints = [endpoint for endpoint in config.endpoints if endpoint.is_unix]
    if not endpoints:
        path = Path(default_endpoint().path or "")
        endpoints = [Endpoint(path=str(path.with_name(f"tcp-{os.getpid()}.sock")))]
    claims = []
    for endpoint in endpoints:
        with _start_errors():
            claim = SocketClaim(endpoint)
        closers.callback(claim.release)
        claims.append(claim)
    return claims


def make_peer_tier(config: Config) -> PeerTier | None:
    """Returns the tier that loads blocks from other servers; None if none may be named."""
    return PeerTier(config.peers.deadline, config.peers.in_flight) if config.peers.servers else None


async def open_runtime(
    config: Config, access: AccessControl, closers: AsyncExitStack, peers: PeerTier | None, downgrades: Downgrades
) -> TierRuntime:
    region_bytes = config.region_size // PAGE_BYTES * PAGE_BYTES
    with _start_errors():
        tiers = await open_on_thread(config.tiers)
    tiers += [peers] if peers is not None else []
    with contextlib.ExitStack() as opened:
        for tier in tiers:
            opened.callback(tier.close)
        sharing, others = access.tenants()
        tenants, layout = with_pools(tenants_of(config, region_bytes, tiers), sharing, region_bytes, has_others=others)
        is_shared = any(type(tier).use_region is not SecondaryTier.use_region for tier in tiers)
        with _start_errors():
            memory = await asyncio.to_thread(open_memory, config.keeper, layout, downgrades, is_shared=is_shared)
        opened.callback(memory.close)
        with _start_errors():
            share_region(tiers, memory.region)
        try:
            memory.region.nodes = _memory_nodes(config.numa)
            settings = tier_settings(config, tenants, layout.pool_starts)
            runtime = TierRuntime(
                memory.region, tiers, settings, memory, stall_seconds=config.limits.tier_stall, downgrades=downgrades
            )
        except ValueError as error:
            raise StartError(quota_error_text(error)) from error
        opened.pop_all()  # from here on the runtime closes the tiers and the memory
    closers.push_async_callback(runtime.close)
    return runtime


def _memory_nodes(numa: str) -> tuple[int, ...]:
    try:
        return choose_nodes(read_placement(numa), memory_nodes())
    except ValueError as error:
        raise ValueError(f"numa = {numa}: {error}") from None


def open_telemetry(
    config: Config, runtime: TierRuntime, sessions: SessionRegistry, started: float, closers: AsyncExitStack
) -> tuple[Metrics, Tracing | None]:
    """Creates the metrics and the tracing, and registers them as observers of the runtime."""
    loop = asyncio.get_running_loop()
    metrics = Metrics(OnceASecond(on_loop(loop, lambda: server_stats(runtime, sessions, started))))
    metrics.expect_tiers(tier.name for tier in runtime.tiers)
    with _start_errors():
        tracing = open_tracing(config.tracing, sessions.epoch, runtime.downgrades)
    if tracing is not None:
        closers.push_async_callback(asyncio.to_thread, tracing.close)
    runtime.observe_jobs(metrics.observe_job if tracing is None else tracing.with_spans(metrics.observe_job))
    runtime.observe_failures(metrics.failed)
    runtime.observe_damage = metrics.mismatches("cpu").inc
    runtime.observe_wrong = metrics.wrong_blocks.inc
    return metrics, tracing


def open_listeners(
    backend: Backend, tracing: Tracing | None, sockets: list[SocketClaim], closers: AsyncExitStack
) -> Listeners:
    """Creates the listeners and starts the attach socket. The caller starts gRPC later."""
    metrics, access, region = backend.metrics, backend.access, backend.runtime.region
    max_message_bytes = backend.config.limits.max_message_bytes + _MESSAGE_OVERHEAD_BYTES
    turns = SliceScheduler(backend.sessions)
    backend.sessions.on_close.append(turns.forget)
    rules = CallRules(
        metrics.calls.observe,
        metrics.refused,
        tracing,
        authorize=access.authorize,
        audit_log=access.audit_log,
        bounds=RequestBounds(backend.config.limits),
        check_rate=backend.sessions.check_rate,
    )
    socket_calls = SocketCallServer(rules, max_message_bytes, turns)
    attach_path = sockets[0].path.with_name(sockets[0].path.name + SUFFIX)
    remedy = "raise the number of open files; docs/running.md#downgrades"
    report = backend.runtime.downgrades.reporter("limits", remedy, subject="accept")
    keeping = backend.runtime.memory.keeping
    attach = AttachServer(attach_path, region, backend.sessions, socket_calls, access, report, keeping)
    with _start_errors():
        attach.start()
    closers.push_async_callback(attach.close)
    if not free_all_batches():
        cause = "cancelled calls leave memory behind, because this version of grpcio is not known"
        backend.runtime.downgrades.report("grpc", cause, "install a version of grpcio that kvtier names")
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_allowed_incoming_connections", max_grpc_connections(len(backend.config.endpoints))),
        *_GRPC_OPTIONS,
    ]
    interceptor = RefusalInterceptor(rules, turns)
    return Listeners(grpc.aio.server(interceptors=[interceptor], options=options), socket_calls, attach, turns)


def add_services(
    backend: Backend, listeners: Listeners, admin: AdminService, long_calls: LongCalls, closers: AsyncExitStack
) -> None:
    """Registers all services with gRPC, and unary calls also with the socket call server."""
    config, runtime, sessions, metrics = backend.config, backend.runtime, backend.sessions, backend.metrics
    attach, access = listeners.attach, backend.access
    validator = RequestValidator(config.limits, config.leases, config.retention, config.handoff)
    writers = Writers(runtime)

    driver = config.devices.driver
    devices = DeviceRegistry(runtime, sessions, driver=driver, unavailable=unavailable_reason(driver))
    closers.push_async_callback(devices.close)
    if devices.unavailable:
        _log.info("device copies are not offered", reason=devices.unavailable)
        if has_gpu() and driver != "off":
            cause = f"device copies are not offered: {devices.unavailable}"
            runtime.downgrades.report(
                "devices", cause, "kvtier doctor --only cuda_ipc; docs/tuning.md", is_logged=False
            )

    broker = BulkBroker(
        runtime, sessions, validator, metrics, writers, long_calls, access.authenticator, access.audit_log
    )
    sessions.on_close.append(broker.end_streams_of_session)
    sessions.on_revoke.append(broker.end_streams_of_session)
    runtime.end_readers = broker.end_streams_of_lease
    with _start_errors():
        streams = bind_streams(config)
    for each in streams:
        closers.callback(each.close)
    bulk = BulkProcess(runtime.region, config, broker, attach.adopt, streams, runtime.downgrades)
    attach.serve_streams = bulk.serve_streams
    closers.push_async_callback(bulk.close)
    if streams and config.peers.servers:
        bulk.locate()  # other servers search here, too, and their first search must not wait for it

    session = SessionService(config, runtime, sessions, attach.path, devices.capabilities)
    session_pb2_grpc.add_SessionServiceServicer_to_server(session, listeners.grpc)
    events = EventService(runtime, sessions, validator, long_calls.scheduler)
    sources = _open_sources(backend, long_calls, closers)
    cache = CacheService(runtime, sessions, validator, bulk.end_writers, writers.record_digests, long_calls, sources)
    handoff = HandoffService(runtime, sessions, validator, long_calls)
    conversations = ConversationService(runtime, sessions, validator, long_calls)
    device_calls = DeviceCopyCalls(runtime, sessions, validator, metrics, devices, writers)
    for server in (listeners.grpc, listeners.socket_calls):
        cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)
        events_pb2_grpc.add_EventServiceServicer_to_server(events, server)
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(handoff, server)
        conversation_pb2_grpc.add_ConversationServiceServicer_to_server(conversations, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        add_device_calls(device_calls, server)
    transfer = TransferService(runtime, sessions, validator, metrics, bulk, RefusingBounds(config.limits), long_calls)
    listeners.grpc.add_generic_rpc_handlers((transfer.handler(),))
    transfer.add_calls(listeners.socket_calls)
    reflection.enable_server_reflection([*_SERVICES, SERVICE_NAME, reflection.SERVICE_NAME], listeners.grpc)


def _open_sources(backend: Backend, long_calls: LongCalls, closers: AsyncExitStack) -> PeerSources:
    """Creates the searches at other servers, and starts to resolve the names of these servers."""
    config = backend.config
    directory = PeerDirectory(config.peers.servers)
    directory.start()
    sources = PeerSources(
        backend.peers,
        backend.runtime,
        directory,
        peer_credentials(config.peers, insecure=config.insecure),
        config.peers.deadline,
        scheduler=long_calls.scheduler,
        description_of=backend.sessions.namespace_of,
        observe=backend.metrics.searched_source,
    )
    closers.push_async_callback(sources.close)
    closers.callback(asyncio.get_running_loop().create_task(sources.sweep()).cancel)
    return sources


async def register_health(server: grpc.aio.Server) -> Health:
    """Adds the health service, with all services NOT_SERVING until the first update."""
    health = Health(_SERVICES)
    await health.register(server)
    return health


def bind_endpoints(config: Config, server: grpc.aio.Server, access: AccessControl) -> list[int]:
    ports = []
    for endpoint in config.endpoints:
        credentials = None if endpoint.is_unix else access.credentials
        try:
            if credentials is None:
                port = server.add_insecure_port(endpoint.target)
            else:
                port = server.add_secure_port(endpoint.target, credentials)
        except RuntimeError as error:
            # gRPC does not report the cause, such as an unknown host name or a port in use.
            cause = None if endpoint.is_unix else port_error(endpoint)
            default = "is the port in use?" if credentials is None else "gRPC cannot use the certificate or its key"
            raise StartError(f"cannot listen on {endpoint}: {cause.strerror if cause else default}") from error
        if not endpoint.is_unix:
            ports.append(port)
    return ports


def start_metrics_server(backend: Backend, drain: Drain, status: AsyncStatus, closers: AsyncExitStack) -> int | None:
    """Serves metrics, health and status page over HTTP; returns the port, None if turned off."""
    config = backend.config.metrics
    if config is None:
        return None
    loop = asyncio.get_running_loop()
    # The health check fails if the server is ending or its event loop does not answer. A broken
    # tier or a drain does not fail the check, because a restart would not help.
    unhealthy = OnceASecond(on_loop(loop, lambda: "draining" if drain.ending else None))
    page = StatusPage(partial(read_on_loop, loop, status))
    with _start_errors():
        server = MetricsServer(
            config,
            backend.metrics.registry,
            unhealthy,
            backend.access.may_see_metrics,
            page=page,
            names=_host_names(backend.config),
        )
    closers.push_async_callback(asyncio.to_thread, server.close)
    return server.port


def _host_names(config: Config) -> set[str] | None:
    """Returns the names of this server for browsers; None if figures need a token."""
    if config.auth.metrics:
        return None
    endpoints = [*config.endpoints, parse_endpoint(config.metrics or "")]
    return {name.lower() for name in (socket.gethostname(), *(each.host for each in endpoints)) if name}


def start_publisher(backend: Backend, closers: AsyncExitStack) -> None:
    """Starts to publish events over ZeroMQ, if an address is configured."""
    config = backend.config.events
    if config.publish is None:
        return
    with _start_errors():
        readers = ReaderProcess(config, backend.runtime.downgrades)
    closers.callback(readers.close)

    def publish() -> Awaitable[None]:
        return EventPublisher(backend.runtime, backend.sessions, config, readers).run()

    task = asyncio.get_running_loop().create_task(readers.run(publish))

    async def stop() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    closers.push_async_callback(stop)
