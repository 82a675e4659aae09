"""Benchmark of examples/disagg_proxy: `python -m bench.proxy [--json FILE] [--profile FILE]`.

One proxy process, on a processor of its own, forwards the requests of many connections to a prefill
engine and a decode engine. The engines are stand-ins that answer at once. In turns, the same
connections call the decode engine directly. So a rate through the proxy is a limit of the proxy:
each request needs two calls of engines, and the direct one needs one call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .machine import facts
from .report import Report
from .service import cpu_seconds_of

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
CONNECTIONS = 32
REQUESTS = 1600
ROUNDS = 5
PROMPT = "Tell me of the sea, the wind and the rain. " * 48
TOKENS = 16
PATIENCE = 60.0
_HELD = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(32))],
    "remote_engine_id": "engine",
    "remote_request_id": "request",
    "remote_host": "127.0.0.1",
    "remote_port": 7070,
    "tp_size": 1,
    "remote_num_tokens": 512,
}


# ---- stand-in engines


class StandInEngine(asyncio.Protocol):
    """HTTP/1.1 server that answers each completion at once, with a hold of its blocks."""

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._received) < end + 4 + size:
                return
            body, self._received = self._received[end + 4 : end + 4 + size], self._received[end + 4 + size :]
            self._transport.write(_answer_to(head.split(b" ", 2)[1], body))
            if b"connection: close" in head:
                self._transport.close()


def _answer_to(path: bytes, body: bytes) -> bytes:
    if b'"stream": true' in body or b'"stream":true' in body:
        return _STREAM
    return {b"/health": _HEALTH, b"/v1/models": _MODELS}.get(path, _WHOLE)


def _http(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def _stream() -> bytes:
    """Returns a response with an event per token in a chunk of its own, as engines send them."""
    events = [{"choices": [{"index": 0, "text": " wave", "finish_reason": None}]} for _ in range(TOKENS)]
    events[-1]["choices"][0]["finish_reason"] = "length"  # type: ignore[index]
    lines = [json.dumps({"id": "c", "object": "text_completion", "model": "m", **event}) for event in events]
    lines += [json.dumps({"choices": [], "usage": {"prompt_tokens": 500, "total_tokens": 500 + TOKENS}}), "[DONE]"]
    chunks = [f"data: {line}\n\n".encode() for line in lines]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        + body
        + b"0\r\n\r\n"
    )


_WHOLE = _http(
    json.dumps(
        {
            "id": "c",
            "object": "text_completion",
            "model": "m",
            "choices": [{"index": 0, "text": " wave" * TOKENS, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 500, "completion_tokens": TOKENS, "total_tokens": 500 + TOKENS},
            "kv_transfer_params": _HELD,
        }
    ).encode()
)
_HEALTH = _http(b"")
_MODELS = _http(b'{"data": [{"id": "m"}]}')
_STREAM = _stream()


async def _serve_engines(ports: Sequence[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(StandInEngine, "127.0.0.1", port)
    print("ready", flush=True)
    await asyncio.Event().wait()


# ---- clients


class _Client:
    """Connection of a client that sends requests one after another."""

    def __init__(self, port: int, number: int) -> None:
        self._port = port
        self._number = number

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def run(self, count: int, *, stream: bool) -> None:
        for turn in range(count):
            fields = {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "stream": stream}
            fields["conversation_id"] = f"{self._number}-{turn // 4}"  # four turns per conversation
            body = json.dumps(fields).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            self._writer.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
            await self._read(stream=stream)

    async def _read(self, *, stream: bool) -> None:
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"a request failed: {head.decode()}")
        if stream:
            body = await self._reader.readuntil(b"\r\n0\r\n\r\n")
            if body.count(b"data: ") < TOKENS + 1 or b"[DONE]" not in body:
                raise RuntimeError("a stream is incomplete")
            return
        size = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if b"wave" not in await self._reader.readexactly(size):
            raise RuntimeError("an answer is wrong")

    def close(self) -> None:
        self._writer.close()


async def _rate(port: int, requests: int, *, stream: bool) -> float:
    """Returns the number of requests per second over all connections."""
    clients = [_Client(port, number) for number in range(CONNECTIONS)]
    await asyncio.gather(*(client.connect() for client in clients))
    began = time.perf_counter()
    await asyncio.gather(*(client.run(requests // CONNECTIONS, stream=stream) for client in clients))
    seconds = time.perf_counter() - began
    for client in clients:
        client.close()
    return requests / seconds


# ---- runs


@dataclass(slots=True)
class _Running:
    proxy_port: int
    decode_port: int
    proxy_pid: int


@contextmanager
def _running(directory: Path, profile: Path | None) -> Iterator[_Running]:
    """Runs the engines and a proxy with a prefill and a decode engine."""
    ports = _free_ports(3)
    processors = sorted(os.sched_getaffinity(0))
    engines = subprocess.Popen(
        [sys.executable, "-m", "bench.proxy", "--engines", *map(str, ports[1:])], stdout=subprocess.PIPE, cwd=ROOT
    )
    command = [sys.executable, "examples/disagg_proxy"]
    if profile is not None:
        command = [sys.executable, "-m", "cProfile", "-o", str(profile), "examples/disagg_proxy/__main__.py"]
    command += ["--prefill", f"http://127.0.0.1:{ports[1]}", "--decode", f"http://127.0.0.1:{ports[2]}"]
    with (directory / "proxy.log").open("wb") as log:
        assert engines.stdout is not None
        engines.stdout.readline()
        proxy = subprocess.Popen([*command, "--port", str(ports[0])], stdout=log, stderr=log, cwd=ROOT)
        os.sched_setaffinity(proxy.pid, processors[:1])
        for pid in (engines.pid, os.getpid()):
            os.sched_setaffinity(pid, processors[1:] or processors)
        try:
            asyncio.run(_wait_for(ports[0], proxy))
            yield _Running(ports[0], ports[2], proxy.pid)
        finally:
            proxy.send_signal(signal.SIGINT)  # at SIGTERM, no profile would be written
            proxy.wait()
            engines.kill()
            engines.wait()


async def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise SystemExit("the proxy does not start; is the extra kvtier[proxy] installed?")


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _measure(report: Report, running: _Running, rounds: int, requests: int, *, stream: bool) -> None:
    kind = "streams" if stream else "whole answers"
    direct, proxied, spent = [], [], []
    for _ in range(rounds):
        direct.append(asyncio.run(_rate(running.decode_port, requests, stream=stream)))
        before = cpu_seconds_of(running.proxy_pid)
        proxied.append(asyncio.run(_rate(running.proxy_port, requests, stream=stream)))
        spent.append((cpu_seconds_of(running.proxy_pid) - before) / requests)
    report.add(f"stand-in engine, {kind}", median(direct), "requests/s")
    report.add(f"through the proxy, {kind}", median(proxied), "requests/s", f"stand-in engine, {kind}")
    report.add(f"processor time of the proxy per request, {kind}", median(spent) * 1e3, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.proxy", description="Measure the example proxy.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a profile of the proxy (cProfile) to FILE")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests per round, over all connections")
    parser.add_argument("--engines", type=int, nargs="*", metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engines:
        asyncio.run(_serve_engines(options.engines))
        return
    report = Report()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        about = facts(Path(directory))
        with _running(Path(directory), options.profile) as running:
            for stream in (False, True):
                _measure(report, running, options.rounds, options.requests, stream=stream)
        about["load"] += f", {os.getloadavg()[0]:.1f} at the end"
    report.show(about)
    if options.json:
        report.write_json(options.json, about)


if __name__ == "__main__":
    main()
