"""Load for servers and a proxy: calls that change every metric of a healthy server and proxy."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import grpc
from harness.disagg_site import Site
from harness.fake_engine import FakeEngine, fail
from harness.launch import Launched, launch
from harness.payloads import filled, key_of, namespace_of, payload
from harness.raw import RawSession
from harness.traffic import PART, wait_connected

from kvtier.client import Client, HandoffDirection, HoldGone, HoldName
from kvtier.protos.v1 import cache_pb2, common_pb2
from kvtier.protos.wire.packed_keys import pack_keys

__all__ = ["busy_proxy", "busy_server"]

CONFIG = """
leases.part = 0.5
tiers = [{type = "lmdb", size = "32MiB"}, {type = "disk", size = "64MiB"},
  {type = "harness.shared_tier:SharedDirectory", name = "common", size = "64MiB"}]
[tenants.acme]
quota = "25%"
limit = "50%"
"""

STEP_SECONDS = 0.1
BATCH = 8


@contextlib.contextmanager
def busy_server(directory: Path) -> Iterator[tuple[Launched, int]]:
    """Runs a server with three lower tiers and two active tenants; yields it and a metrics port."""
    directory.mkdir()
    config = directory / "kvtier.toml"
    config.write_text(CONFIG, encoding="utf-8")
    endpoint = f"unix:{directory}/s"
    stop = threading.Event()
    with launch(directory, "--metrics", "127.0.0.1:0", "--config", str(config)) as server:
        port = server.wait_ready()["metrics_port"]
        engines: list[tuple[Callable[..., None], tuple[object, ...]]] = [
            (engine, (endpoint, "acme", "shm", stop)),
            (engine, (endpoint, "", "grpc", stop)),
            (stale_engine, (endpoint, stop)),
        ]
        threads = [threading.Thread(target=target, args=arguments) for target, arguments in engines]
        for thread in threads:
            thread.start()
        try:
            yield server, port
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def engine(endpoint: str, tenant: str, transport: Literal["shm", "grpc"], stop: threading.Event) -> None:
    """Stores, loads from memory and lower tiers, looks up unknown keys, and hands requests over."""
    name = f"engine-{tenant or 'rest'}"
    with Client(endpoint, namespace=namespace_of(PART, tenant=tenant), engine_id=name, transport=transport) as client:
        wait_connected(client)
        client.lookup(
            [key_of(-number) for number in range(10, 10_000)], prefix=False
        ).release()  # enough for an estimate
        step = 0
        while not stop.wait(STEP_SECONDS):
            keys = [key_of(number) for number in range(step * BATCH, (step + 1) * BATCH)]
            client.store(keys, [payload(key, PART) for key in keys])
            client.load(keys, filled(BATCH, PART))
            earlier = [key_of(number) for number in range(max(0, step - 60) * BATCH, max(1, step - 59) * BATCH)]
            client.load(earlier, filled(BATCH, PART), wait=1)
            client.lookup([key_of(-1), key_of(-2)]).release()
            hand_over(client, name, step, keys)
            wait_for_room(client, step)
            step += 1


def wait_for_room(client: Client, step: int) -> None:
    """Looks up blocks while a lease pins as much as the leases of the tenant `acme` may pin."""
    latest = [key_of(number) for number in range(max(0, step - 7) * BATCH, (step + 1) * BATCH)]
    earlier = [key_of(number) for number in range(max(0, step - 9) * BATCH, max(0, step - 7) * BATCH)]
    with client.lookup(latest, prefix=False):
        client.lookup(earlier, wait=STEP_SECONDS).release()


def hand_over(client: Client, name: str, step: int, keys: list[bytes]) -> None:
    """Publishes one claimed and one unclaimed request per direction; then claims without a hold."""
    positions = list(range(len(keys)))
    for direction in HandoffDirection:
        request = f"{direction.name}-{step}"
        client.publish(request, keys, positions, num_tokens=16 * len(keys), direction=direction)
        with contextlib.suppress(HoldGone):  # declined, because the memory for holds is small
            client.claim(HoldName(name, request), request_id=f"claim-{step}").release()
        client.release_holds(HoldName(name, request))
        client.publish(f"{request}-lost", keys, positions, num_tokens=1, direction=direction, hold_for=0.5)
    with contextlib.suppress(HoldGone):
        client.claim(HoldName(name, "never-published"))


def stale_engine(endpoint: str, stop: threading.Event) -> None:
    """Makes calls with a session of an earlier epoch of the server."""
    with RawSession(endpoint, namespace_of(PART), engine_id="stale") as raw:
        ref = common_pb2.SessionRef(session_id=raw.ref.session_id, epoch=raw.ref.epoch + 1)
        while not stop.wait(0.5):
            with contextlib.suppress(grpc.RpcError):
                raw.cache.Lookup(cache_pb2.LookupRequest(session=ref, keys=pack_keys([key_of(1)])), timeout=5)


@contextlib.contextmanager
def busy_proxy() -> Iterator[int]:
    """Runs a proxy with stand-in engines; its servers for hints and state are absent.

    Yields its port.
    """
    ports: queue.Queue[int] = queue.Queue()
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(proxy_clients(ports, stop)))
    thread.start()
    try:
        yield ports.get(timeout=60)
    finally:
        stop.set()
        thread.join()


async def proxy_clients(ports: queue.Queue[int], stop: threading.Event) -> None:
    engines = [FakeEngine("p0"), FakeEngine("d0")]
    for engine in engines:
        await engine.start()
    site = Site(engines[:1], engines[1:])
    settings = replace(site.settings(hints="unix:/nowhere/s"), max_entries=1, state="valkey://127.0.0.1:1")
    async with site.proxy(settings) as proxy:
        ports.put(int(proxy.url.rpartition(":")[2]))
        step = 0
        while not stop.is_set():
            for conversation, stream in (("a", False), ("a", True), (f"c{step}", False)):
                await proxy.turn(conversation, stream=stream)
            engines[0].script.append(fail(500))  # a retry, and a turn without a prefill engine
            await proxy.turn("a")
            await proxy.http.post("/hints", json={"model": "m", "conversation_id": "a", "hint": "prefetch"})
            await asyncio.sleep(STEP_SECONDS)
            step += 1
    for engine in engines:
        await engine.stop()
        engine.close()
