"""The metrics of a real server process."""

from __future__ import annotations

from pathlib import Path

from harness.http_get import get
from harness.launch import launch
from harness.payloads import key_of, namespace_of
from harness.polling import wait_until
from harness.traffic import PART, assert_stored, store, wait_connected
from prometheus_client.parser import text_string_to_metric_families

from kvtier.client import Client


def test_a_scrape_adds_up(tmp_path: Path) -> None:
    """Used bytes are within the capacity; hits and misses add up to the keys of lookups."""
    with launch(tmp_path, "--metrics", "127.0.0.1:0") as server:
        port = server.wait_ready()["metrics_port"]
        endpoint = f"unix:{tmp_path}/s"
        keys = store(endpoint)
        assert_stored(endpoint, keys)
        with Client(endpoint, namespace=namespace_of(PART)) as client:
            wait_connected(client)
            with client.lookup([*keys[:4], key_of(999), *keys[4:]]) as lease:
                assert lease.prefix_hits == 4
                # earlier sessions may still be closing
                wait_until(lambda: total(scrape(port), "kvtier_sessions") == 1)
                values = scrape(port)
                assert total(values, "kvtier_leases") == 1
                assert values["kvtier_sessions", (("transport", client.transport or ""),)] == 1
        hits, misses = total(values, "kvtier_tier_hits_total"), total(values, "kvtier_lookup_misses_total")
        assert hits + misses == total(values, "kvtier_lookup_keys_total") == 2 * len(keys) + 1
        assert total(values, "kvtier_namespace_hits_total") == hits
        assert total(values, "kvtier_namespace_misses_total") == misses
        assert total(values, "kvtier_namespace_blocks") == 2 * len(keys)
        assert total(values, "kvtier_sessions_opened_total") == 3
        assert hits >= len(keys) + 4
        assert misses >= 1
        for tier in ("cpu", "lmdb"):
            labels = (("tier", tier),)
            used, capacity = (values[f"kvtier_tier_{name}_bytes", labels] for name in ("used", "capacity"))
            assert len(keys) * PART <= used <= capacity
            assert values["kvtier_tier_blocks", labels] == len(keys)
            assert values["kvtier_tier_healthy", labels] == 1
        assert total(values, "kvtier_rpc_duration_seconds_count") > 0
        job = (("operation", "store"), ("tier", "lmdb"))
        assert values["kvtier_tier_job_bytes_total", job] == len(keys) * PART
        assert (
            values["kvtier_tier_job_blocks_total", (("operation", "store"), ("outcome", "done"), ("tier", "lmdb"))] == 8
        )
        assert values["kvtier_snapshot_ok", ()] == 1
        wait_until(lambda: total(scrape(port), "kvtier_loop_lag_seconds_count"))
        assert get(port, "/healthz")[2] == "ok\n"
        assert server.end() == 0


Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(port: int) -> Values:
    families = list(text_string_to_metric_families(get(port, "/metrics")[2]))
    samples = [sample for family in families for sample in family.samples]
    values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(values) == len(samples)
    return values


def total(values: Values, name: str) -> float:
    """Returns the sum over all labels."""
    found = [value for (sample, _), value in values.items() if sample == name]
    assert found, f"no {name}"
    return sum(found)
