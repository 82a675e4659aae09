"""Server process: starts all components, waits for a signal, stops them in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from types import FrameType

from ..cuda.host.memory import tune_malloc
from .config.machine import max_grpc_connections
from .config.schema import Config
from .core_runtime import TierRuntime
from .drain import Drain
from .process.gc_tuning import FullCollector, HeapTrimmer, disable_full_gc
from .process.systemd import ServiceManager
from .rpc.grpc_connections import GrpcConnections
from .rpc.sessions import SessionRegistry
from .services.admin import AdminService
from .services.admin_messages import build_status
from .services.long_calls import LongCalls
from .startup import (
    Backend,
    StartError,
    add_services,
    bind_endpoints,
    claim_sockets,
    load_access_control,
    make_peer_tier,
    open_listeners,
    open_runtime,
    open_telemetry,
    register_health,
    start_metrics_server,
    start_publisher,
)
from .telemetry.downgrades import Downgrades
from .telemetry.grpc_health import Health
from .telemetry.logs import get_logger
from .telemetry.loop_lag import LoopLag, watch_loop

__all__ = ["EXIT_LEFT_BEHIND", "Server", "serve"]

EXIT_LEFT_BEHIND = 3
"""Exit code if threads of a tier did not end. The tier's running jobs are lost, as after a kill."""

_log = get_logger(__name__)

_GRACE_SECONDS = 1.0
_WATCH_SECONDS = 1.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_UNUSED = (signal.SIGUSR1, signal.SIGUSR2)


def serve(config: Config, downgrades: Downgrades | None = None) -> int:
    """Runs a server until a signal or a drain ends it; returns the exit code of the process.

    `downgrades`: those that were found before the start.

    If the code is `EXIT_LEFT_BEHIND`, threads may still access the region. The caller must then end
    the process with `os._exit`, because a normal exit would unmap the region.
    """
    tune_malloc()
    # A copy on a worker thread waits for the GIL after each block. With the default switch interval
    # of 5 ms, one busy thread would reduce the copy rate by a factor of 100.
    sys.setswitchinterval(1e-4)
    try:
        return asyncio.run(_serve(config, downgrades))
    except StartError as error:
        _log.error("cannot start", reason=str(error))
        return 1


async def _serve(config: Config, downgrades: Downgrades | None) -> int:
    stop = asyncio.Event()
    with _handle_signals(asyncio.get_running_loop(), stop):
        server = Server(config, stop.set, downgrades)
        manager = ServiceManager(server.downgrades)
        abandon = asyncio.get_running_loop().create_task(_abandon_start(server, stop))
        try:
            await server.start()
            manager.ready()
            await stop.wait()
        except (asyncio.CancelledError, StartError):  # the signal also ends children
            if not stop.is_set():
                raise
        finally:
            abandon.cancel()
            manager.stopping()
            await server.stop()
            manager.close()
    return EXIT_LEFT_BEHIND if server.left_behind else 0


async def _abandon_start(server: Server, stop: asyncio.Event) -> None:
    await stop.wait()
    server.abandon_start()


@contextlib.contextmanager
def _handle_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Iterator[None]:
    """Handles the signals. The first that ends the server sets `stop`.

    The handlers stay until the process has ended. In the context each signal wakes the loop.

    Children block the signals (`tiers.storage.service_signals`). SIGHUP is ignored if it was
    ignored before the start, as by `nohup`.

    `loop.add_signal_handler` would restore the default action when the loop closes, and a further
    signal would then kill the process before it has returned its exit code.

    A handler runs only when the main thread executes Python code. If a signal arrives just before
    the thread waits for events, only a byte on a socket that the loop reads ends the wait.
    """

    def on_ending(number: int) -> None:
        if not stop.is_set():
            _log.info("the server ends because of a signal", signal=signal.Signals(number).name)
            stop.set()

    def on_unused(number: int) -> None:
        _log.warning("a signal without a meaning for the server is ignored", signal=signal.Signals(number).name)

    wakes, wake = socket.socketpair()
    with wakes, wake:
        for end in (wakes, wake):
            end.setblocking(False)
        loop.add_reader(wakes, wakes.recv, 4096)
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            for numbers, callback in ((_ENDING, on_ending), (_UNUSED, on_unused)):
                for number in numbers:
                    if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                        signal.signal(number, _deferring(loop, callback))
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(wakes)


def _deferring(
    loop: asyncio.AbstractEventLoop, callback: Callable[[int], object]
) -> Callable[[int, FrameType | None], None]:
    """Returns a handler that runs `callback` on the loop.

    A handler interrupts the main thread anywhere, so it must not log: the thread may hold the lock
    of the log's queue.
    """

    def handle(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            loop.call_soon_threadsafe(callback, number)

    return handle


class Server:
    """One server: `start`, then `stop`, on the same event loop.

    Each stage of `start` registers a function that closes what the stage opened. `stop` calls these
    functions in reverse order:

    1. The health service reports NOT_SERVING, and the periodic tasks end.
    2. The drain finishes running stores and jobs, then ends all sessions.
    3. gRPC, metrics server, bulk process, device copy workers and attach socket close.
    4. Tracing sends the last spans; the runtime closes tiers and region; sockets are released.
    """

    def __init__(
        self, config: Config, end: Callable[[], object] = lambda: None, downgrades: Downgrades | None = None
    ) -> None:
        """`end` is called when `kvtier drain` ends the server. The caller must then call `stop`."""
        self.config = config
        self.ports: list[int] = []
        """TCP ports that the server listens on. A configured port 0 appears as the chosen port."""
        self.metrics_port: int | None = None
        self._end = end
        self.downgrades = downgrades or Downgrades()
        self._opening: asyncio.Task[TierRuntime] | None = None
        self._runtime: TierRuntime | None = None
        self._closers = contextlib.AsyncExitStack()
        self._has_started = False

    @property
    def left_behind(self) -> list[str]:
        """Names of the tiers whose worker threads did not end during `stop`."""
        return self._runtime.left_behind if self._runtime is not None else []

    async def start(self) -> None:
        """Starts all components. Raises `StartError` if a resource is not available."""
        loop, config, closers = asyncio.get_running_loop(), self.config, self._closers
        started = loop.time()

        access = load_access_control(config, self.downgrades)
        sockets = claim_sockets(config, closers)
        peers = make_peer_tier(config)
        self._opening = loop.create_task(open_runtime(config, access, closers, peers, self.downgrades))
        runtime = self._runtime = await self._opening
        sessions = SessionRegistry(runtime, config.limits.max_sessions, access.rate_limiters)
        metrics, tracing = open_telemetry(config, runtime, sessions, started, closers)
        backend = Backend(config, runtime, sessions, access, metrics, peers)
        listeners = open_listeners(backend, tracing, sockets, closers)

        drain, loop_lag = Drain(runtime, sessions, self._end), LoopLag()
        status = partial(build_status, runtime, sessions, started, loop_lag, listeners.turns.pause)
        self.ports = bind_endpoints(config, listeners.grpc, access)
        long_calls = LongCalls(runtime, sessions, listeners.turns)
        admin = AdminService(runtime, sessions, status, drain, long_calls)
        add_services(backend, listeners, admin, long_calls, closers)
        health = await register_health(listeners.grpc)
        self.metrics_port = start_metrics_server(backend, drain, status, closers)

        # Called after the tiers are open, so that the many objects of their indexes are exempt.
        disable_full_gc()
        await runtime.start()  # backs the first extent before the first call
        start_publisher(backend, closers)
        await listeners.grpc.start()
        closers.push_async_callback(listeners.grpc.stop, _GRACE_SECONDS)
        closers.push_async_callback(drain.finish)
        for claim in sockets:
            claim.restrict()
        await health.update(runtime.stats())
        self._run_until_stop(_watch(backend, health))
        most = max_grpc_connections(len(config.endpoints))
        connections = GrpcConnections(self.ports, most, lambda: [each.peer for each in sessions.all()])
        self._run_until_stop(connections.watch())
        closers.callback(connections.start_alarm())
        self._run_until_stop(watch_loop(metrics.loop_lag.observe, loop_lag.observe))
        closers.push_async_callback(health.shut_down)
        self._has_started = True
        runtime.memory.server_is_ready()
        _log.info(
            "ready",
            listen=list(config.listen),
            ports=self.ports,
            metrics_port=self.metrics_port,
            region_bytes=runtime.region.size_bytes,
            tiers=[tier.name for tier in runtime.stats().tiers],
            epoch=f"{sessions.epoch:016x}",
            seconds=round(loop.time() - started, 3),
        )

    def abandon_start(self) -> None:
        """Makes `start` raise `asyncio.CancelledError` if it has not opened the tiers yet."""
        if self._opening is not None:
            self._opening.cancel()

    async def stop(self) -> None:
        """Drains the server and releases everything. Call it also after a failed `start`."""
        await self._closers.aclose()
        if self.left_behind:
            _log.error("stopped, but threads of tiers did not end", tiers=self.left_behind, exit_code=EXIT_LEFT_BEHIND)
        elif self._has_started:
            _log.info("stopped")

    def _run_until_stop(self, coroutine: Coroutine[None, None, None]) -> None:
        self._closers.callback(asyncio.get_running_loop().create_task(coroutine).cancel)


async def _watch(backend: Backend, health: Health) -> None:
    """Every second reloads changed tokens, updates the health service, and runs `FullCollector`."""
    runtime, metrics = backend.runtime, backend.metrics
    collector, trimmer = FullCollector(runtime.now()), HeapTrimmer(runtime.now())
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        try:
            backend.access.refresh(backend.sessions.revoke)
            await health.update(runtime.stats())
            collector.tick(runtime.now(), metrics.calls.total)
            await trimmer.tick(runtime.now())
        except Exception as error:  # noqa: BLE001 - otherwise revoked tokens would stay valid
            metrics.failed("watch")
            _log.error("watch failed", exc_info=error)
