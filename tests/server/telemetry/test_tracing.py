"""Spans of calls and jobs, as a collector receives them."""

from __future__ import annotations

import re
import socket
import statistics
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from harness.collector import collector
from harness.launch import Launched, launch
from harness.payloads import key_of, namespace_of
from harness.polling import stays, wait_until
from harness.raw import RawSession
from harness.traffic import PART, assert_stored, store

from kvtier.client import Client
from kvtier.protos.v1 import cache_pb2, common_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.server.config.loader import load
from kvtier.server.config.schema import ConfigError
from kvtier.server.config.tracing import TracingConfig
from kvtier.server.telemetry.tracing import TracingError, open_tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
REFUSES = "http://127.0.0.1:1"


def config(path: Path, endpoint: str, ratio: float = 1.0) -> str:
    """Returns a configuration file with these settings of tracing."""
    file = path / "kvtier.toml"
    file.write_text(f'[tracing]\nendpoint = "{endpoint}"\nratio = {ratio}\n', encoding="utf-8")
    return str(file)


def complaints(server: Launched) -> list[dict[str, Any]]:
    """Returns the lines of OpenTelemetry in the log."""
    return [line for line in server.log if str(line.get("logger", "")).startswith("opentelemetry")]


def look_up(raw: RawSession, request_id: str, traceparent: str = "") -> None:
    """Looks up a block, within a trace if one is given."""
    metadata = [("traceparent", traceparent)] if traceparent else []
    request = cache_pb2.LookupRequest(session=raw.ref, keys=pack_keys([key_of(1)]), request_id=request_id)
    raw.cache.Lookup(request, timeout=60, metadata=metadata)


def test_a_call_continues_the_trace_of_its_caller(tmp_path: Path) -> None:
    """The span is a child of the caller's, with request id and status.

    An unsampled trace has no span.
    """
    with collector() as found, launch(tmp_path, "--config", config(tmp_path, found.endpoint, ratio=0)) as server:
        ready = server.wait_ready()
        with RawSession(f"unix:{tmp_path}/s", namespace_of(PART), engine_id="e") as raw:
            look_up(raw, "unrecorded", f"00-{TRACE[::-1]}-{PARENT}-00")
            look_up(raw, "alone")
            look_up(raw, "malformed", "00-hello-world")
            look_up(raw, "recorded", f"00-{TRACE}-{PARENT}-01")
            stale = common_pb2.SessionRef(session_id=raw.ref.session_id, epoch=1)
            with pytest.raises(Exception, match="earlier run"):
                raw.cache.Lookup(
                    cache_pb2.LookupRequest(session=stale, keys=pack_keys([key_of(1)])),
                    timeout=60,
                    metadata=[("traceparent", f"00-{TRACE}-{PARENT}-01")],
                )
        refused = found.wait_for(lambda span: span.attributes["rpc.grpc.status_code"] == "FAILED_PRECONDITION")
        span = found.wait_for(lambda span: span.attributes["rpc.grpc.status_code"] == "OK")
        assert server.end() == 0
    assert len(found.spans) == 2
    assert (span.trace_id, span.parent_id) == (TRACE, PARENT)
    assert span.name == "kvtier.v1.CacheService/Lookup"
    assert span.attributes["kvtier.request_id"] == "recorded"
    assert span.attributes["rpc.method"] == "Lookup"
    assert span.resource["service.name"] == "kvtier"
    assert span.resource["service.instance.id"] == ready["epoch"]
    assert 0 < span.seconds < 5
    assert not span.failed
    assert not refused.failed
    assert "kvtier.request_id" not in refused.attributes


def test_tier_jobs_and_local_calls_start_traces(tmp_path: Path) -> None:
    """Remaining spans are sent when the server ends."""
    with collector() as found:
        with launch(tmp_path, "--config", config(tmp_path, found.endpoint)) as server:
            server.wait_ready()
            keys = store(f"unix:{tmp_path}/s")
            assert_stored(f"unix:{tmp_path}/s", keys)
            assert server.end() == 0
        jobs = [span for span in found.spans if span.name == "store lmdb"]
        assert sum(span.attributes["kvtier.blocks_done"] for span in jobs) == len(keys)
        assert sum(span.attributes["kvtier.bytes"] for span in jobs) == len(keys) * PART
        calls = [span for span in found.spans if span.name == "kvtier.v1.CacheService/CompleteStore"]
        assert calls
        assert not any(span.parent_id or span.failed for span in [*jobs, *calls])


def test_an_exemplar_names_the_trace(tmp_path: Path) -> None:
    """In the OpenMetrics format a bucket of the call durations has the id of a trace."""
    with collector() as found:
        file = config(tmp_path, found.endpoint, ratio=0)
        with launch(tmp_path, "--metrics", "127.0.0.1:0", "--config", file) as server:
            port = server.wait_ready()["metrics_port"]
            with RawSession(f"unix:{tmp_path}/s", namespace_of(PART), engine_id="e") as raw:
                look_up(raw, "recorded", f"00-{TRACE}-{PARENT}-01")
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
            text = connection.getresponse().read().decode()
            connection.close()
            assert server.end() == 0
    exemplars = re.findall(r'kvtier_rpc_duration_seconds_bucket\{(.*?)\} \S+ # \{trace_id="(\w+)"\}', text)
    assert [trace for labels, trace in exemplars if "CacheService/Lookup" in labels] == [TRACE]


@pytest.mark.slow
@pytest.mark.parametrize("refuses", [True, False], ids=["refuses", "is silent"])
def test_a_missing_collector_does_no_harm(tmp_path: Path, *, refuses: bool) -> None:
    """Calls are answered, the server ends in time, and logs the error once."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        launch(
            tmp_path,
            "--config",
            config(tmp_path, REFUSES if refuses else f"http://127.0.0.1:{silent.getsockname()[1]}"),
        ) as server,
    ):
        server.wait_ready()
        keys = store(f"unix:{tmp_path}/s")
        with Client(f"unix:{tmp_path}/s", namespace=namespace_of(PART)) as client:
            client.wait_until_connected(60)
            took = []
            for _ in range(300):
                began = time.monotonic()
                client.lookup(keys).release()
                took.append(time.monotonic() - began)
        assert statistics.median(took) < 1
        if refuses:
            wait_until(lambda: complaints(server))
            store(f"unix:{tmp_path}/s")
            stays(lambda: len(complaints(server)) == 1, 2.5)  # spans are sent every second
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 45
        assert len(complaints(server)) <= 1
        assert not [line for line in server.log if "exception" in line]


def test_tracing_is_off_by_default() -> None:
    """Without configuration OpenTelemetry is not imported."""
    assert open_tracing(TracingConfig(), 1) is None
    program = "import kvtier.server.app, sys; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "meant"),
    [("off", None), ("http://127.0.0.1:4317", "http://127.0.0.1:4317"), ("https://[::1]:1", "https://[::1]:1")],
)
def test_the_endpoint_is_a_url_or_off(text: str, meant: str | None) -> None:
    assert load(environ={"KVTIER_TRACING_ENDPOINT": text}).config.tracing.endpoint == meant


@pytest.mark.parametrize("text", ["127.0.0.1:4317", "ftp://127.0.0.1:4317", "http://nowhere", "http://unix:/s"])
def test_an_invalid_endpoint_is_refused(text: str) -> None:
    """The error, at the start, gives the expected form."""
    with pytest.raises(ConfigError, match="endpoint"):
        load(environ={"KVTIER_TRACING_ENDPOINT": text})


def test_tracing_without_the_extra_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not start, and the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingError, match=r"pip install 'kvtier\[tracing\]'"):
        open_tracing(TracingConfig(endpoint="http://127.0.0.1:1"), 1)
