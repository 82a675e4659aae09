"""The Prometheus metrics and their endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.http_get import get
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvtier.server.telemetry.http import MetricsServer
from kvtier.server.telemetry.metrics import Metrics, ServerStats
from kvtier.tiers.secondary_tier import NamespaceId, Outcome
from kvtier.tiers.stats.miss_ratio_curve import HitRatio
from kvtier.tiers.stats.snapshots import ManagerStats, NamespaceStats, TierStats
from kvtier.tiers.types import MissReason, ShareStats

SPACE = NamespaceId(b"acme" + bytes(28))

STATS = ServerStats(
    manager=ManagerStats(
        tiers=(
            TierStats(
                "cpu",
                "cpu",
                8 << 30,
                4 << 30,
                1 << 30,
                blocks=16,
                hits=70,
                misses=30,
                evictions=2,
                estimates=(HitRatio(0.5, 0.25), HitRatio(8.0, 0.75)),
            ),
            TierStats(
                "lmdb",
                "lmdb",
                1 << 40,
                1 << 40,
                5,
                blocks=1,
                hits=20,
                misses=10,
                jobs=3,
                damaged=6,
                healthy=False,
                expired=6,
                not_retained=8,
                shares=(ShareStats("", 0, None, 2, 0), ShareStats("acme", 7, None, 3, 1)),
            ),
        ),
        leases=4,
        stores=2,
        quarantined_bytes=64,
        namespaces=1,
        lookup_keys=100,
        lookup_misses=10,
        misses_by_reason={MissReason.EVICTED: 7, MissReason.NEVER_STORED: 3},
    ),
    epoch=0xABC,
    uptime_seconds=12.5,
    region_bytes=8 << 30,
    region_backed_bytes=4 << 30,
    sessions_by_transport={"shm": 2, "grpc": 1, "smoke": 1, "drums": 1},
    namespaces=[
        NamespaceStats(SPACE, "acme", (3, 1), (70, 20), {MissReason.EVICTED: 7}),
        NamespaceStats(None, "", (13, 0), (0, 0), {MissReason.NEVER_STORED: 3}),
    ],
    models={SPACE: "some-model"},
)


class Scrape(dict[tuple[str, frozenset[tuple[str, str]]], float]):
    """The samples of a scrape: `scrape("kvtier_sessions", transport="shm")`."""

    def __init__(self, text: str) -> None:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self[sample.name, frozenset(sample.labels.items())] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self[name, frozenset(labels.items())]

    def total(self, name: str) -> float:
        """Returns the sum over all labels."""
        return sum(value for (sample, _), value in self.items() if sample == name)


@pytest.fixture
def metrics() -> Metrics:
    """Returns metrics of a server with constant figures."""
    return Metrics(lambda: STATS)


@pytest.fixture
def server(no_leaks: None, metrics: Metrics) -> Iterator[MetricsServer]:  # noqa: ARG001 - is to watch
    """Yields the endpoint of these metrics, on a free port."""
    server = MetricsServer("127.0.0.1:0", metrics.registry)
    yield server
    server.close()


class TestFigures:
    def test_tier_figures_are_those_of_the_snapshot(self, server: MetricsServer) -> None:
        """There is one series per tier."""
        status, content_type, body = get(server.port, "/metrics")
        values = Scrape(body)
        assert status == 200
        assert content_type.startswith("text/plain")
        assert values("kvtier_tier_capacity_bytes", tier="cpu") == 8 << 30
        assert values("kvtier_tier_used_bytes", tier="lmdb") == 5
        assert values("kvtier_tier_hits_total", tier="cpu") == 70
        assert values("kvtier_tier_evictions_total", tier="cpu") == 2
        assert values("kvtier_tier_jobs", tier="lmdb") == 3
        assert values("kvtier_tier_damaged_total", tier="lmdb") == 6
        assert (values("kvtier_tier_healthy", tier="cpu"), values("kvtier_tier_healthy", tier="lmdb")) == (1, 0)
        assert values("kvtier_sessions", transport="shm") == 2
        assert values("kvtier_leases") == 4
        assert values("kvtier_stores") == 2
        assert values("kvtier_quarantined_bytes") == 64
        assert values("kvtier_region_backed_bytes") == 4 << 30
        assert values("kvtier_uptime_seconds") == 12.5
        assert values("kvtier_snapshot_ok") == 1
        assert "process_resident_memory_bytes" in body
        assert 'epoch="0000000000000abc"' in body
        assert 'kvtier_tier_info{position="1",shared="no",tier="lmdb",type="lmdb"} 1.0' in body

    def test_tenant_shares(self, server: MetricsServer) -> None:
        """Used and guaranteed bytes per tier; the empty name stands for all other blocks."""
        values = Scrape(get(server.port, "/metrics")[2])
        acme = {"tier": "lmdb", "tenant": "acme"}
        figures = [values(f"kvtier_tenant_{name}_bytes", **acme) for name in ("quota", "used", "retained")]
        assert figures == [7, 3, 1]
        assert values("kvtier_tenant_used_bytes", tier="lmdb", tenant="") == 2
        assert values("kvtier_tier_expired_total", tier="lmdb") == 6
        assert values("kvtier_tier_not_retained_total", tier="lmdb") == 8

    def test_hit_ratios_of_other_sizes(self, server: MetricsServer) -> None:
        """A size without enough samples has no series."""
        values = Scrape(get(server.port, "/metrics")[2])
        assert values("kvtier_estimated_hit_ratio", tier="cpu", scale="0.5") == 0.25
        assert values("kvtier_estimated_hit_ratio", tier="cpu", scale="8") == 0.75
        assert len([name for name, _ in values if name == "kvtier_estimated_hit_ratio"]) == 2

    def test_unknown_transports_share_a_series(self, server: MetricsServer) -> None:
        """A name that a client invents makes no series."""
        values = Scrape(get(server.port, "/metrics")[2])
        assert values("kvtier_sessions", transport="other") == 2
        assert values("kvtier_sessions", transport="tcp") == 0

    def test_namespace_figures(self, server: MetricsServer) -> None:
        """Each has its id and tenant; namespaces beyond the limit share a series."""
        values = Scrape(get(server.port, "/metrics")[2])
        mine = {"namespace": SPACE.hex(), "tenant": "acme"}
        assert values("kvtier_namespace_info", **mine, model="some-model") == 1
        assert values("kvtier_namespace_blocks", **mine, tier="cpu") == 3
        assert values("kvtier_namespace_hits_total", **mine, tier="lmdb") == 20
        assert values("kvtier_namespace_misses_total", **mine, reason="evicted") == 7
        assert values("kvtier_namespace_misses_total", namespace="other", tenant="", reason="never_stored") == 3

    def test_refusals_are_counted(self, metrics: Metrics, server: MetricsServer) -> None:
        """By service and reason; each starts at zero, so that the first refusal is an increase."""
        metrics.refused("/kvtier.v1.SessionService/Open", "LIMIT_EXCEEDED")
        values = Scrape(get(server.port, "/metrics")[2])
        assert values("kvtier_refusals_total", service="SessionService", reason="LIMIT_EXCEEDED") == 1
        assert values("kvtier_refusals_total", service="CacheService", reason="STALE_EPOCH") == 0

    def test_failures_of_the_loop_are_counted(self, metrics: Metrics, server: MetricsServer) -> None:
        """By the part that failed; each starts at zero."""
        metrics.failed("slice")
        values = Scrape(get(server.port, "/metrics")[2])
        assert [values("kvtier_loop_failures_total", work=work) for work in ("tick", "slice", "watch")] == [0, 1, 0]

    def test_job_counters_start_at_zero(self, metrics: Metrics, server: MetricsServer) -> None:
        metrics.expect_tiers(["lmdb"])
        values = Scrape(get(server.port, "/metrics")[2])
        assert values("kvtier_tier_job_blocks_total", tier="lmdb", operation="load", outcome="corrupt") == 0
        assert values("kvtier_tier_job_duration_seconds_count", tier="lmdb", operation="store") == 0
        assert values("kvtier_checksum_mismatches_total", where="lmdb") == 0

    def test_every_key_is_counted_once(self, server: MetricsServer) -> None:
        """Hits of all tiers and misses of lookups add up to the keys of lookups."""
        values = Scrape(get(server.port, "/metrics")[2])
        hits = values.total("kvtier_tier_hits_total")
        assert hits + values.total("kvtier_lookup_misses_total") == values("kvtier_lookup_keys_total")
        assert values("kvtier_lookup_misses_total", reason="evicted") == 7
        assert values("kvtier_lookup_misses_total", reason="expired") == 0

    def test_calls_are_counted(self, metrics: Metrics, server: MetricsServer) -> None:
        """By method and code, with their durations."""
        for code in ("OK", "OK", "NOT_FOUND"):
            metrics.calls.observe("/kvtier.v1.CacheService/Lookup", code, 0.003)
        values = Scrape(get(server.port, "/metrics")[2])
        assert values("kvtier_rpc_duration_seconds_count", method="CacheService/Lookup", code="OK") == 2
        assert (
            values("kvtier_rpc_duration_seconds_bucket", method="CacheService/Lookup", code="NOT_FOUND", le="0.002")
            == 0
        )
        assert (
            values("kvtier_rpc_duration_seconds_bucket", method="CacheService/Lookup", code="NOT_FOUND", le="0.005")
            == 1
        )

    def test_jobs_are_counted(self, metrics: Metrics, server: MetricsServer) -> None:
        """By tier, with bytes and outcomes; a corrupt block is a checksum mismatch."""
        metrics.observe_job("lmdb", "load", 0.1, 300, [Outcome.DONE, Outcome.DONE, Outcome.CORRUPT])
        metrics.observe_job("lmdb", "load", 0.1, 100, [Outcome.DONE])
        metrics.transfer("grpc", "in").inc(5)
        metrics.mismatches("grpc").inc()
        values = Scrape(get(server.port, "/metrics")[2])
        assert values("kvtier_tier_job_bytes_total", tier="lmdb", operation="load") == 400
        assert values("kvtier_tier_job_duration_seconds_count", tier="lmdb", operation="load") == 2
        assert values("kvtier_tier_job_blocks_total", tier="lmdb", operation="load", outcome="done") == 3
        assert values("kvtier_tier_job_blocks_total", tier="lmdb", operation="load", outcome="corrupt") == 1
        assert values("kvtier_checksum_mismatches_total", where="lmdb") == 1
        assert values("kvtier_checksum_mismatches_total", where="grpc") == 1
        assert values("kvtier_transfer_bytes_total", transport="grpc", direction="in") == 5

    def test_names_are_valid_openmetrics(self, server: MetricsServer) -> None:
        """Every metric begins with kvtier_ and has a help text."""
        _, content_type, body = get(server.port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert content_type.startswith("application/openmetrics-text")
        families = list(parse_openmetrics(body))
        assert len(families) > 20
        for family in families:
            assert family.name.startswith(("kvtier_", "process_"))
            assert family.documentation.endswith(".")

    def test_a_failed_snapshot_is_reported(self) -> None:
        """The other metrics are exposed."""

        def fail() -> ServerStats:
            raise TimeoutError

        metrics = Metrics(fail)
        metrics.calls.observe("/kvtier.v1.A/B", "OK", 1)
        server = MetricsServer("127.0.0.1:0", metrics.registry)
        try:
            values = Scrape(get(server.port, "/metrics")[2])
        finally:
            server.close()
        assert values("kvtier_snapshot_ok") == 0
        assert values("kvtier_rpc_duration_seconds_count", method="A/B", code="OK") == 1

    def test_registries_are_separate(self) -> None:
        """Two servers in one process do not share figures."""
        one, other = Metrics(lambda: STATS), Metrics(lambda: STATS)
        one.transfer("shm", "in").inc()
        labels = {"transport": "shm", "direction": "in"}
        assert one.registry.get_sample_value("kvtier_transfer_bytes_total", labels) == 1
        assert other.registry.get_sample_value("kvtier_transfer_bytes_total", labels) is None
