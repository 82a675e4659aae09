"""Benchmark of fairness: what one abusive client costs an honest client of the same server.

`python -m bench.fairness NAME ENDPOINT` is one client in its own process. An abusive client repeats
its calls until it is killed. The honest client measures once per line of its standard input.

There are three kinds of abuse. `Abuser` makes the largest legal calls with the client. `Flood`
repeats a small serialized request on 60 connections, so that it needs little processor time, and
`HttpFlood` fetches pages of the metrics port.
"""

from __future__ import annotations

import http.client
import json
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import grpc

from kvtier.client import Client, Credentials, HoldName, KVTierError, StoreStatus
from kvtier.protos.endpoint import parse_endpoint
from kvtier.protos.v1 import admin_pb2, cache_pb2, common_pb2, conversation_pb2, handoff_pb2, session_pb2
from kvtier.protos.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.protos.v1.session_pb2_grpc import SessionServiceStub
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import HEAD_BYTES, Purpose, next_call_number, pack_call, pack_hello, unpack_head
from kvtier.server.commands.admin_client import ask, follow

from .measure import percentile, timed
from .peers.base import free_port
from .report import Report
from .service import Service
from .workload import Keys, connect

__all__ = ["ABUSES", "FLOODS", "TENANTS", "Abuser", "Flood", "HonestClient", "measure_fairness"]

REGION_BYTES = 512 << 20
LMDB_BYTES = 1 << 30
BLOCK_BYTES = 64 << 10
ABUSER_BLOCK_BYTES = 4096
"""Another size than the honest client's, so that the two clients have different namespaces."""
MOST_KEYS = 65_536
BATCH = 4
LOOKUP_KEYS = 64
CALLERS = 4
"""Threads of the abusive client, each with one call in progress."""
ROUNDS = 3
SECONDS = 2.0
WARM_UP_SECONDS = 0.5
TENANTS = 'tenants.honest = {quota = "45%", limit = "45%"}\ntenants.abusive = {limit = "45%"}\n'
RATES = 'tenants.abusive = {limit = "45%", rates = {calls = 20}}'
UNREAD_STREAMS = 32
CONNECTIONS = 60
GRPC_STREAMS = 60
SESSIONS = 20
HTTP_THREADS = 8
PROCESSES = 4
FLOOD_KEYS = 256
PARAMS_BYTES = 230_000
_PATIENCE = 30.0
_PAUSE_SECONDS = 0.01


class Abuser:
    """One caller of the abusive client. Each public method is an abuse: its largest legal calls."""

    def __init__(self, endpoint: str, caller: int) -> None:
        self._endpoint = parse_endpoint(endpoint)
        self._client: Client = connect(endpoint, "shm", ABUSER_BLOCK_BYTES, tenant="abusive")
        self._series = Keys(f"abuse {caller} {time.time_ns()}")
        self._unknown = Keys("unknown").take(MOST_KEYS)
        self._stored = self._series.take(8192)
        self._client.store(self._stored, [memoryview(bytes(ABUSER_BLOCK_BYTES))] * len(self._stored))
        self._request_id = f"abuse-{caller}"
        self._explained = False
        self._hold: HoldName | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def spin(self) -> None:
        """Uses a processor without any call: the part of a slow-down that is not the server's."""
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            sum(range(1000))

    def lookups_of_unknown_keys(self) -> None:
        self._client.lookup(self._unknown, prefix=False, request_id=self._request_id).release()

    def lookups_of_one_key(self) -> None:
        self._client.lookup(self._stored[:1] * MOST_KEYS, prefix=False).release()

    def lookups_of_hits(self) -> None:
        self._client.lookup(self._stored, request_id=self._request_id).release()

    def flushes(self) -> None:
        self._client.flush(self._stored[:1] * MOST_KEYS, wait=0.2)

    def stores_of_new_keys(self) -> None:
        with suppress(KVTierError), self._client.write(self._series.take(MOST_KEYS)):
            raise KVTierError("nothing is stored")

    def stores_of_present_keys(self) -> None:
        with self._client.write(self._stored):
            pass

    def resets(self) -> None:
        self._client.store(self._stored, [memoryview(bytes(ABUSER_BLOCK_BYTES))] * len(self._stored))
        self._client.reset()

    def publications(self) -> None:
        self._client.publish(self._request_id, self._unknown, range(MOST_KEYS), num_tokens=16 * MOST_KEYS)

    def statuses(self) -> None:
        ask(self._endpoint, "GetStatus", admin_pb2.GetStatusRequest(), _PATIENCE)

    def explanations(self) -> None:
        """Explains a request whose 64 lookups each alternate between hits and misses."""
        if not self._explained:
            self._explained = True
            mixed = [key for pair in zip(self._unknown[:512], self._stored[:512], strict=True) for key in pair]
            for _ in range(64):
                self._client.lookup(mixed, prefix=False, request_id=self._request_id).release()
        request = admin_pb2.ExplainRequestRequest(request_id=self._request_id)
        ask(self._endpoint, "ExplainRequest", request, _PATIENCE)

    def evictions(self) -> None:
        for _ in follow(self._endpoint, "Evict", admin_pb2.EvictRequest(dry_run=True), _PATIENCE):
            pass

    def checks(self) -> None:
        for _ in follow(self._endpoint, "Fsck", admin_pb2.FsckRequest(), _PATIENCE):
            pass

    def unread_streams(self) -> None:
        """Begins evictions and reads none of their messages."""
        with Credentials.from_environment().channel(self._endpoint) as channel:
            stub = AdminServiceStub(channel)
            calls = [stub.Evict(admin_pb2.EvictRequest(dry_run=True)) for _ in range(UNREAD_STREAMS)]
            time.sleep(0.2)
            for call in calls:
                call.cancel()

    def claims(self) -> None:
        """Claims a hold of stored blocks, which the first call publishes."""
        if self._hold is None:
            keys = self._stored * (MOST_KEYS // len(self._stored))
            self._client.publish(self._request_id, keys, range(MOST_KEYS), num_tokens=16 * MOST_KEYS)
            self._hold = HoldName(self._client.engine_id, self._request_id)
        self._client.claim(self._hold).release()


class Flood:
    """Connections of the abusive tenant that repeat one request. Each public method is an abuse."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = parse_endpoint(endpoint)
        self._channel = Credentials.from_environment().channel(self._endpoint)
        group = common_pb2.Group(name="full", block_tokens=16, part_bytes=ABUSER_BLOCK_BYTES)
        self._namespace = common_pb2.Namespace(
            model="flood", dtype="uint8", world_size=1, tenant="abusive", groups=[group]
        )
        self._streams: list[grpc.Call] = []
        self._ref = self._open()
        self._keys = Keys(f"flood {time.time_ns()}").take(FLOOD_KEYS)

    def _open(self) -> common_pb2.SessionRef:
        request = session_pb2.OpenRequest(
            protocol_version=2, client_name="flood", engine_id=f"flood-{len(self._streams)}", namespace=self._namespace
        )
        self._streams.append(SessionServiceStub(self._channel).Open(request))
        ref: common_pb2.SessionRef = next(self._streams[-1]).session
        return ref

    def lookups(self, connections: int = CONNECTIONS) -> None:
        self._repeat(
            "CacheService/Lookup",
            cache_pb2.LookupRequest(session=self._ref, keys=pack_keys(self._keys[:1])),
            connections,
        )

    def lookups_of_256_keys(self) -> None:
        self._repeat(
            "CacheService/Lookup", cache_pb2.LookupRequest(session=self._ref, keys=pack_keys(self._keys), mode=2)
        )

    def flushes_of_256_keys(self) -> None:
        self._repeat("CacheService/Flush", cache_pb2.FlushRequest(session=self._ref, keys=pack_keys(self._keys)))

    def holds_of_256_keys(self) -> None:
        request = handoff_pb2.PublishHoldRequest(
            session=self._ref, request_id="r", keys=pack_keys(self._keys), positions=range(FLOOD_KEYS), num_tokens=1
        )
        self._repeat("HandoffService/PublishHold", request)

    def requests_with_long_parameters(self) -> None:
        params = json.dumps({f"{number}": number for number in range(PARAMS_BYTES // 18)})
        self._repeat(
            "CacheService/BeginRequest",
            cache_pb2.BeginRequestRequest(session=self._ref, request_id="r", kv_transfer_params_json=params),
        )

    def requests_with_parameters(self) -> None:
        params = json.dumps({f"{number}": number for number in range(800)})
        self._repeat(
            "CacheService/BeginRequest",
            cache_pb2.BeginRequestRequest(session=self._ref, request_id="r", kv_transfer_params_json=params),
        )

    def garbage(self) -> None:
        self._repeat("CacheService/BeginRequest", b"\xff" * 300)

    def lists_of_conversations(self) -> None:
        for number in range(100):
            begin = cache_pb2.BeginRequestRequest(
                session=self._ref, request_id=f"{number}", keys=pack_keys(self._keys), conversation_id=f"{number}"
            )
            self._channel.unary_unary(
                "/kvtier.v1.CacheService/BeginRequest",
                cache_pb2.BeginRequestRequest.SerializeToString,
                cache_pb2.BeginRequestResponse.FromString,
            ).future(begin).exception()
        self._repeat(
            "ConversationService/ListConversations", conversation_pb2.ListConversationsRequest(tenant="abusive")
        )

    def single_bytes(self) -> None:
        """Sends a request byte by byte."""
        self._repeat(
            "CacheService/Lookup", cache_pb2.LookupRequest(session=self._ref, keys=pack_keys(self._keys)), piece=1
        )

    def lookups_of_many_sessions(self) -> None:
        refs = [self._open() for _ in range(SESSIONS)]
        requests = [cache_pb2.LookupRequest(session=ref, keys=pack_keys(self._keys), mode=2) for ref in refs]
        _repeat_on(
            [
                (self._connect(ref), b"CacheService/Lookup", request.SerializeToString())
                for ref, request in zip(refs, requests, strict=True)
                for _ in range(CONNECTIONS // SESSIONS)
            ]
        )

    def lookups_over_grpc(self) -> None:
        message = cache_pb2.LookupRequest(session=self._ref, keys=pack_keys(self._keys), mode=2).SerializeToString()
        self._repeat_over_grpc("kvtier.v1.CacheService/Lookup", message)

    def health_checks(self) -> None:
        self._repeat_over_grpc("grpc.health.v1.Health/Check")

    def capabilities(self) -> None:
        self._repeat_over_grpc("kvtier.v1.SessionService/Capabilities")

    def _repeat_over_grpc(self, method: str, message: bytes = b"") -> None:
        call = self._channel.unary_unary(f"/{method}")

        def repeat() -> None:
            while True:
                with suppress(grpc.RpcError):
                    call(message)

        _in_threads(repeat, GRPC_STREAMS)

    def sessions(self) -> None:
        """Opens and ends sessions."""
        while True:
            with suppress(grpc.RpcError):
                self._open()
                self._streams.pop().cancel()

    def connections(self) -> None:
        """Opens and ends connections for calls."""
        while True:
            self._connect(self._ref).close()

    def _connect(self, ref: common_pb2.SessionRef) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(f"{self._endpoint.path}.shm")
        connection.sendall(pack_hello(Purpose.CALLS, ref.session_id, ref.epoch, next_call_number()))
        if not connection.recv(HEAD_BYTES + 1):
            raise RuntimeError("the server refused a connection")
        return connection

    def _repeat(self, method: str, request: Any, connections: int = CONNECTIONS, piece: int = 0) -> None:
        message = request if isinstance(request, bytes) else request.SerializeToString()
        _repeat_on([(self._connect(self._ref), method.encode(), message) for _ in range(connections)], piece)


def _repeat_on(calls: list[tuple[socket.socket, bytes, bytes]], piece: int = 0) -> None:
    """Sends each request again after its answer.

    With `piece`, sends this number of bytes at a time, and does not wait for the answers.
    """
    selector = selectors.EpollSelector()
    for connection, name, message in calls:
        connection.setblocking(True)
        selector.register(connection, selectors.EVENT_READ, (name, message))
        if not piece:
            connection.sendall(pack_call(next_call_number(), name, message))
    missing, rest = Counter[Any](), dict.fromkeys((connection for connection, _, _ in calls), b"")
    while True:
        for connection, name, message in calls if piece else ():
            left = rest[connection] or pack_call(next_call_number(), name, message)
            connection.sendall(left[:piece])
            rest[connection] = left[piece:]
        for key, _ in selector.select(0 if piece else None):
            for _ in range(_answers(key.fileobj, missing)):
                if not piece:
                    key.fileobj.sendall(pack_call(next_call_number(), *key.data))  # type: ignore[union-attr]


def _answers(connection: Any, missing: Counter[Any]) -> int:
    """Reads from a connection; returns how many answers have ended.

    `missing` has the bytes of the last answer that have not arrived, by connection.
    """
    data, ended = connection.recv(1 << 20), 0
    if not data:
        raise RuntimeError("the server closed a connection")
    while data:
        if not missing[connection]:
            missing[connection] = HEAD_BYTES + unpack_head(data)[0]
        taken = min(len(data), missing[connection])
        missing[connection] -= taken
        data = data[taken:]
        ended += not missing[connection]
    return ended


class HttpFlood:
    """Threads that fetch a page of the metrics port in a loop. Each public method is an abuse."""

    def __init__(self, address: str) -> None:
        self._address = address

    def metrics(self) -> None:
        self._fetch("/metrics")

    def status_json(self) -> None:
        self._fetch("/status.json")

    def _fetch(self, path: str) -> None:
        def repeat() -> None:
            while True:
                connection = http.client.HTTPConnection(self._address, timeout=_PATIENCE)
                with suppress(OSError, http.client.HTTPException):
                    while True:
                        connection.request("GET", path)
                        connection.getresponse().read()
                connection.close()

        _in_threads(repeat, HTTP_THREADS)


def _in_threads(repeat: Callable[[], None], threads: int) -> None:
    for _ in range(threads - 1):
        threading.Thread(target=repeat, daemon=True).start()
    repeat()


class HonestClient:
    """The honest client: lookups of hits, and stores and loads of a few blocks."""

    def __init__(self, endpoint: str) -> None:
        self._client = connect(endpoint, "shm", BLOCK_BYTES, tenant="honest")
        self._keys = Keys(f"honest {time.time_ns()}")
        self._block = bytearray(BLOCK_BYTES)
        self._found = self._keys.take(LOOKUP_KEYS)
        self.failed = 0
        self._client.store(self._found, [memoryview(self._block)] * LOOKUP_KEYS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def attempt(self) -> None:
        """Makes one step. A failed step lasts until the client has a session again."""
        try:
            self.step()
        except KVTierError:
            self.failed += 1
            self._client.wait_until_connected(_PATIENCE)

    def step(self) -> None:
        """Raises if a call gives another result than on an idle server."""
        with self._client.lookup(self._found) as lease:
            if lease.prefix_hits != LOOKUP_KEYS:
                raise RuntimeError(f"only {lease.prefix_hits} of {LOOKUP_KEYS} blocks were found")
        keys = self._keys.take(BATCH)
        statuses = self._client.store(keys, [memoryview(self._block)] * BATCH)
        if statuses.count(StoreStatus.GRANTED) != BATCH:
            raise RuntimeError("not all blocks were stored")
        if self._client.load(keys, [memoryview(self._block)] * BATCH) != BATCH:
            raise RuntimeError("not all blocks were loaded")


ABUSES = tuple(name for name in vars(Abuser) if not name.startswith("_"))
FLOODS = tuple(name for name in vars(Flood) if not name.startswith("_"))
HTTP_FLOODS = tuple(name for name in vars(HttpFlood) if not name.startswith("_"))

LIMITED_FLOODS = (
    "lookups",
    "flushes_of_256_keys",
    "holds_of_256_keys",
    "garbage",
    "lists_of_conversations",
    "lookups_over_grpc",
)


def measure_fairness(report: Report, directory: Path) -> None:
    """Adds the honest client's rate and p99, alone and beside each abuse: medians of the rounds.

    The row `spin` shows what a client costs that only uses a processor of the machine.
    """
    metrics = f"127.0.0.1:{free_port()}"
    config = f'metrics = "{metrics}"\n{TENANTS}'
    rows: dict[str, list[tuple[float, float]]] = {}
    with Service(directory, REGION_BYTES, lmdb_bytes=LMDB_BYTES, config=config) as service:
        service.start()
        with _process("honest", service.unix) as honest:
            for _ in range(ROUNDS):
                _measure(rows, honest, "alone")
                for abuse in (*ABUSES, *FLOODS):
                    with _process(abuse, service.unix):
                        _measure(rows, honest, abuse.replace("_", " "))
                for flood in HTTP_FLOODS:
                    with _process(flood, metrics):
                        _measure(rows, honest, f"fetches of {flood.replace('_', '.')}")
                with ExitStack() as processes:
                    for _ in range(PROCESSES):
                        processes.enter_context(_process("lookups", service.unix))
                    _measure(rows, honest, f"lookups of {PROCESSES} processes")
    with Service(directory, REGION_BYTES, config=TENANTS.partition("tenants.abusive")[0] + RATES) as service:
        service.start()
        with _process("honest", service.unix) as honest:
            for _ in range(ROUNDS):
                for abuse in ("spin", *LIMITED_FLOODS):
                    with _process(abuse, service.unix):
                        _measure(rows, honest, f"{abuse.replace('_', ' ')} at 20 calls/s")
    for name, measured in rows.items():
        _add(report, name, *(statistics.median(figures) for figures in zip(*measured, strict=True)))


def _measure(rows: dict[str, list[tuple[float, float]]], honest: subprocess.Popen[str], name: str) -> None:
    """Adds the rate and the p99 of one measurement."""
    assert honest.stdin is not None
    assert honest.stdout is not None
    print(file=honest.stdin, flush=True)
    found = json.loads(honest.stdout.readline())
    seconds = found["seconds"]
    figures = ((len(seconds) - found["failed"]) / sum(seconds), percentile(seconds, 0.99))
    rows.setdefault(name, []).append(figures)


def _add(report: Report, name: str, steps: float, p99: float) -> None:
    beside = f"honest client beside {name}" if name != "alone" else "honest client alone"
    limit = None if name in ("alone", "spin") else "honest client beside spin"
    report.add(f"{beside}: steps", steps, "1/s", f"{limit}: steps" if limit else None)
    report.add(f"{beside}: p99", p99, "ms", f"{limit}: p99" if limit else None)


@contextmanager
def _process(name: str, endpoint: str) -> Iterator[subprocess.Popen[str]]:
    """Runs one client until the `with` statement ends; waits until its work has begun."""
    command = [sys.executable, "-m", "bench.fairness", name, endpoint]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the client of {name} ended early")
        yield process
    finally:
        process.kill()
        process.communicate()


def _main(name: str, endpoint: str) -> None:
    if name == "honest":
        honest = HonestClient(endpoint)
        print("ready", flush=True)
        for _ in sys.stdin:
            _repeat(honest.attempt, WARM_UP_SECONDS)
            honest.failed = 0
            print(json.dumps({"seconds": _repeat(honest.attempt, SECONDS), "failed": honest.failed}), flush=True)
        return
    if name in FLOODS or name in HTTP_FLOODS:
        flood = Flood(endpoint) if name in FLOODS else HttpFlood(endpoint)
        threading.Thread(target=getattr(flood, name), daemon=True).start()
        print("ready", flush=True)
        sys.stdin.read()
        return
    callers = [Abuser(endpoint, caller) for caller in range(CALLERS)]
    for caller in callers:
        threading.Thread(target=_abuse, args=(getattr(caller, name),), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


def _abuse(call: Callable[[], None]) -> None:
    """Repeats a call. The server may refuse it or be slow."""
    while True:
        try:
            call()
        except KVTierError:
            time.sleep(_PAUSE_SECONDS)


def _repeat(action: Callable[[], None], seconds: float) -> list[float]:
    times, until = [timed(action)], time.monotonic() + seconds
    while time.monotonic() < until:
        times.append(timed(action))
    return times


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
