"""What of a client's request line and headers reaches engines, and of an engine's the client."""

from __future__ import annotations

import json

import pytest
from harness.disagg_site import Site
from harness.running_proxy import PATH


@pytest.mark.parametrize("host", ["x/reset_prefix_cache?", "x/v1/models", "x#", "[", "a b"])
async def test_what_engines_are_asked_is_not_the_hosts_business(site: Site, host: str) -> None:
    """A `Host` with `/` and `?` in it (Starlette 1.0.0 makes a URL of it) reaches no other path of an engine."""
    async with site.proxy() as proxy:
        answer = await proxy.http.post(PATH, json={"prompt": "x", "stream": True}, headers={"host": host})
        assert answer.status_code == 200
        assert await proxy.metric("first_token_seconds_count", route=PATH) == 1
        nowhere = await proxy.http.get("/nowhere", headers={"host": host})
        assert nowhere.json()["error"]["message"] == "There is no GET /nowhere here."
    assert [asked.path for engine in (site.prefill[0], site.decode[0]) for asked in engine.seen] == [PATH] * 2


async def test_a_path_that_only_looks_like_one_is_not_passed_on(site: Site) -> None:
    """Starlette's routes let a last line break through: engines are asked for the route all the same."""
    async with site.proxy() as proxy:
        answer = await proxy.http.post(f"{PATH}%0A", content=json.dumps({"prompt": "x"}))
        assert answer.status_code == 200
        assert await proxy.metric("requests_total", outcome="ok", route=PATH) == 1
    assert [asked.path for asked in site.decode[0].seen] == [PATH]
