"""Each feature of the registry of downgrades, with a fault that the server reports for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.auth_site import Tokens, make_site
from harness.certificates import Authority
from harness.command_line import json_output
from harness.server_process import MIB, ServerProcess

from kvtier.cuda.host.region import HUGE_PAGE_BYTES, RegionError
from kvtier.server.auth.authenticator import AccessControl
from kvtier.server.bulk import supervisor
from kvtier.server.bulk.supervisor import BulkProcess
from kvtier.server.config.schema import AuthConfig, Config, TlsConfig
from kvtier.server.events import reader_process
from kvtier.server.events.reader_process import ReaderProcess
from kvtier.server.peers.sources import PeerSources
from kvtier.server.process.child import Restarts
from kvtier.server.region_backing import RegionBacking
from kvtier.server.telemetry.downgrades import Downgrades

Provoke = Callable[[Downgrades, Path, pytest.MonkeyPatch], None]


def backing_of(downgrades: Downgrades, **region: Any) -> RegionBacking:
    """The backing of a region with these attributes."""
    size = 4 * HUGE_PAGE_BYTES
    own: Any = SimpleNamespace(
        **{"size_bytes": size, "huge_bytes": size, "backed_bytes": 0, "misplaced": None, **region}
    )
    return RegionBacking(own, downgrades, lambda *_: None)


def small_pages(downgrades: Downgrades, _path: Path, _patch: pytest.MonkeyPatch) -> None:
    backing_of(downgrades, huge_bytes=0).report_placement()


def other_nodes(downgrades: Downgrades, _path: Path, _patch: pytest.MonkeyPatch) -> None:
    backing_of(downgrades, misplaced="mbind is not permitted").report_placement()


def short_memory(downgrades: Downgrades, _path: Path, _patch: pytest.MonkeyPatch) -> None:
    def refuse(_offset: int, _nbytes: int) -> None:
        raise RegionError("no memory")

    assert not backing_of(downgrades, back=refuse).back([(0, HUGE_PAGE_BYTES)])


def expired_certificate(downgrades: Downgrades, path: Path, _patch: pytest.MonkeyPatch) -> None:
    pair = Authority(path).issue("server", days=(-2, -1))
    AccessControl(
        Config(
            listen=("unix:/nowhere",),
            region_size=MIB,
            data_dir=path,
            tls=TlsConfig(cert=Path(pair.cert), key=Path(pair.key)),
        ),
        downgrades,
    )


def unusable_tokens(downgrades: Downgrades, path: Path, _patch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(path / "tokens.toml")
    tokens.add("boss", None, "admin")
    access = AccessControl(
        Config(listen=("unix:/nowhere",), region_size=MIB, data_dir=path, auth=AuthConfig(tokens=tokens.path)),
        downgrades,
    )
    good = tokens.path.read_text()
    tokens.path.write_text("junk")
    access.refresh(lambda _: None)
    assert downgrades.all()
    tokens.path.write_text(good)
    access.refresh(lambda _: None)
    assert not downgrades.all()
    tokens.path.write_text("junk")
    access.refresh(lambda _: None)


def priority_of_streams(downgrades: Downgrades, _path: Path, _patch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(_restarts=Restarts("", "streams", supervisor._REMEDIES, downgrades))
    header = {"slower": "streams may delay calls: not permitted", "subject": "priority"}
    BulkProcess._take(process, None, header, b"")  # type: ignore[arg-type]


def priority_of_readers(downgrades: Downgrades, _path: Path, _patch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(_restarts=Restarts("", "events", reader_process._REMEDIES, downgrades))
    ReaderProcess._take(process, {"slower": "readers of events may delay calls", "subject": "priority"}, b"")  # type: ignore[arg-type]


def readers_not_accepted(downgrades: Downgrades, _path: Path, _patch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(_restarts=Restarts("", "events", reader_process._REMEDIES, downgrades))
    ReaderProcess._take(process, {"slower": "first", "subject": "accept"}, b"")  # type: ignore[arg-type]
    ReaderProcess._take(process, {"slower": "", "subject": "accept"}, b"")  # type: ignore[arg-type]
    assert not downgrades.all()
    ReaderProcess._take(process, {"slower": "too many open files", "subject": "accept"}, b"")  # type: ignore[arg-type]


def unreachable_source(downgrades: Downgrades, _path: Path, _patch: pytest.MonkeyPatch) -> None:
    breaker = SimpleNamespace(failed=lambda _: None)
    place = ("10.0.0.9:7070", "")
    sources = SimpleNamespace(_breakers={place: breaker}, _runtime=SimpleNamespace(downgrades=downgrades))
    PeerSources._failed(sources, place, TimeoutError())  # type: ignore[arg-type]


CASES: list[tuple[str, Provoke, str]] = [
    ("region", small_pages, "on huge pages"),
    ("region", other_nodes, "mbind is not permitted"),
    ("region", short_memory, "bytes are backed: no memory"),
    ("credentials", expired_certificate, "clients will refuse the certificate"),
    ("credentials", unusable_tokens, "the previous tokens stay valid"),
    ("streams", priority_of_streams, "streams may delay calls"),
    ("events", priority_of_readers, "readers of events may delay calls"),
    ("events", readers_not_accepted, "too many open files"),
    ("peers", unreachable_source, "no answer in time"),
]


@pytest.mark.parametrize(("feature", "provoke", "words"), CASES, ids=[case.__name__ for _, case, _ in CASES])
def test_a_fault_is_a_downgrade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feature: str, provoke: Provoke, words: str
) -> None:
    """One fault is one downgrade, with a cause and a remedy."""
    downgrades = Downgrades()
    provoke(downgrades, tmp_path, monkeypatch)
    [found] = downgrades.all()
    assert found.feature == feature
    assert words in found.cause
    assert found.remedy


def test_faults_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with many faults: the status and doctor show each with its cause."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "no-systemd"))
    config = "[bulk]\ntcp = false"
    limit = ("bash", "-c", 'ulimit -n 300; exec "$@"', "bash")
    with ServerProcess(tmp_path, tcp=True, config=config, prefix=limit) as server:
        server.start()
        found = {each.feature: each.cause for each in server.status().downgrades}
        for feature, words in (
            ("configuration", "bulk.tcp = false"),
            ("limits", "open files"),
            ("service_manager", "does not learn the state"),
        ):
            assert any(words in each.cause for each in server.status().downgrades if each.feature == feature), found
        shown = json_output("doctor", "--no-disk-test", "--only", "server", "--endpoint", server.endpoint)
        assert all(any(cause in each["seen"] for each in shown["findings"]) for cause in found.values())


def test_an_unusable_new_certificate(tmp_path: Path) -> None:
    """It is shown after the next handshake, and no longer when the files are mended."""
    site = make_site(tmp_path)
    with site.server.start():
        cert = tmp_path / "server.pem"
        good = cert.read_bytes()
        cert.write_bytes(b"junk")
        with site.client("acme-far") as client:
            client.wait_until_connected(60)

        def causes() -> list[str]:
            return [each.cause for each in site.server.status().downgrades if each.feature == "credentials"]

        assert "the previous one stays in use" in causes()[0]
        cert.write_bytes(good)
        with site.client("acme-far") as client:
            client.wait_until_connected(60)
        assert causes() == []
