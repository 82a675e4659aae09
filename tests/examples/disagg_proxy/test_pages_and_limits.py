"""Pages of the proxy, and its limits."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from disagg_proxy import bodies
from harness.disagg_site import Site
from harness.fake_engine import fail, hang
from harness.polling import async_wait_until, stays
from harness.ports import ReservedPort
from harness.running_proxy import PATH, Clock, run_proxy

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "disagg_proxy"


async def test_health_is_that_of_the_decode_engines(site: Site) -> None:
    """B2.24 Without any D nothing can be answered: 503, until one is back.

    A P that is down is said, and no more than that.
    """
    p, d = site.prefill[0], site.decode[0]
    async with site.proxy() as proxy:
        p.health = 503
        await proxy.wait_health(p, up=False)
        assert (await proxy.http.get("/health")).status_code == 200
        d.health = 404
        await proxy.wait_health(d, up=False)
        assert (await proxy.http.get("/health")).status_code == 503
        assert await proxy.metric("instance_up", role="decode", instance=d.url) == 0
        p.health = d.health = 200
        await proxy.wait_health(p, up=True)
        await proxy.wait_health(d, up=True)
        assert (await proxy.http.get("/health")).status_code == 200


async def test_engines_down_at_start_are_known(site: Site) -> None:
    """Engines are checked before the first request."""
    await site.prefill[0].stop()
    async with site.proxy(site.settings(prefills=2)) as proxy:
        assert [engine["up"] for engine in (await proxy.health())["prefill"]] == [False, True]
        await proxy.turn()
        assert await proxy.metric("retries_total", cause="connect", role="prefill") == 0
    await site.prefill[0].start()


async def test_models_are_ds(site: Site) -> None:
    """Clients ask for models first; without a D there is an error in OpenAI's form."""
    async with site.proxy() as proxy:
        answer = await proxy.http.get("/v1/models")
        assert (answer.status_code, answer.json()["data"][0]["id"]) == (200, "model-of-d0")
        await site.decode[0].stop()
        answer = await proxy.http.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, 502)
    await site.decode[0].start()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/embeddings", 404), ("GET", "/", 404), ("GET", PATH, 405), ("POST", "/health", 405)],
)
async def test_other_routes(site: Site, method: str, path: str, status: int) -> None:
    """Refused in OpenAI's form, and not forwarded."""
    async with site.proxy() as proxy:
        answer = await proxy.http.request(method, path, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
        assert path in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"conversation_id": 7}', b""])
async def test_what_cannot_be_understood(site: Site, body: bytes) -> None:
    """400, and no engine gets the request."""
    async with site.proxy() as proxy:
        answer = await proxy.http.post(PATH, content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert await proxy.metric("requests_total", outcome="client_error", route=PATH) == 1
    assert not site.prefill[0].seen


async def test_bodies_are_bounded(site: Site) -> None:
    """A body that is too large is not read to its end, declared or not."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000

    async with site.proxy(replace(site.settings(), max_body=5000)) as proxy:
        assert (await proxy.http.post(PATH, json={"prompt": "x" * 4000})).status_code == 200
        assert (await proxy.http.post(PATH, json={"prompt": "x" * 5000})).status_code == 413
        with contextlib.suppress(
            httpx.TransportError
        ):  # a client that goes on sending may be disconnected before it reads the response
            assert (await proxy.http.post(PATH, content=endless())).status_code == 413
        assert await proxy.metric("requests_total", outcome="client_error", route=PATH) == 2
    assert len(site.prefill[0].seen) == 1


async def test_a_body_that_does_not_come(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends nothing does not keep its slot."""
    monkeypatch.setattr(bodies, "READ_TIMEOUT_S", 0.1)
    async with site.proxy() as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()


async def test_requests_at_once_are_bounded(site: Site) -> None:
    """One request too many is refused at once; later ones are served again."""
    async with site.proxy(replace(site.settings(), max_requests=2)) as proxy:
        site.prefill[0].script.extend([hang, hang])
        busy = [asyncio.create_task(proxy.turn()) for _ in range(2)]
        await async_wait_until(lambda: len(site.prefill[0].seen) == 2)
        answer = await proxy.turn()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert await proxy.metric("requests_total", outcome="busy", route=PATH) == 1
        assert (await proxy.http.get("/health")).status_code == 200
        for turn in busy:
            turn.cancel()
        await asyncio.gather(*busy, return_exceptions=True)

        async def served() -> bool:
            return (await proxy.turn()).status_code == 200

        await async_wait_until(served)


async def test_entries_are_bounded(site: Site) -> None:
    """The oldest entries are removed."""
    async with site.proxy(replace(site.settings(), max_entries=2)) as proxy:
        for name in ("c1", "c2", "c3"):
            await proxy.turn(name)
        assert await proxy.metric("entries") == 2
        assert await proxy.metric("entries_evicted_total", reason="no_room") == 1


async def test_probes_show_the_key_of_the_environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with `--api-key` refuse other clients."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    async with site.proxy():
        pass
    assert site.decode[0].probes[0].headers["authorization"] == "Bearer secret"


async def test_a_probe_that_fails_is_repeated(site: Site) -> None:
    """D cannot answer the first probe; it is probed again with the next health check."""
    site.decode[0].probe_script.extend([fail(500), fail(500)])
    async with site.proxy() as proxy:
        assert (await proxy.health())["decode"][0]["engine_id"] == "d0"
    assert len(site.decode[0].probes) == 3


async def test_a_probe_that_fails_is_not_repeated_at_once(site: Site) -> None:
    """A failing engine is probed as often as its health is checked, not once a second."""
    probes, clock = site.decode[0].probes, Clock()
    site.decode[0].probe_script.append(fail(500))
    async with run_proxy(replace(site.settings(), check_interval=60.0), clock) as proxy:
        await async_wait_until(lambda: len(probes) == 1)
        await asyncio.to_thread(stays, lambda: len(probes) == 1, 2.5)
        clock.ahead += 61.0
        await proxy.wait_discovered("d0")
    assert len(probes) == 2


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is free and stays free."""
    with ReservedPort() as reserved:
        yield reserved.number


@pytest.mark.parametrize("arguments", [["-m", "disagg_proxy"], [str(FOLDER)]])
async def test_the_program(site: Site, arguments: list[str], port: int) -> None:
    """It starts from its folder or as a module, answers, and ends on SIGTERM."""
    command = [
        *arguments,
        "--prefill",
        site.prefill[0].url,
        "--decode",
        site.decode[0].url,
        "--port",
        str(port),
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=FOLDER.parent, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:

            async def answers() -> bool:
                try:
                    return (await http.get("/health")).status_code == 200
                except httpx.TransportError:
                    return False

            await async_wait_until(answers)
            for _ in range(2):
                assert (await http.post(PATH, json={"prompt": "x", "conversation_id": "c"})).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, errors = await process.communicate()
        assert process.returncode in {0, -signal.SIGTERM}
        assert b"Traceback" not in errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert site.prefill[0].seen[1].params["remote_request_id"] in site.decode[0].holds
