"""SGLang does not wait for the digests of the model's files. Until then every page misses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rig
from harness.polling import wait_until
from harness.server_process import ServerProcess
from rig import attach, await_links, hashes, kv_pool, rows

from kvtier.client.engines import identity

KEYS = hashes("prompt", 6)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when the digests of files are known. Storages are attached before that."""
    event, original = threading.Event(), identity.fingerprint_of  # type: ignore[attr-defined]

    def identify(*arguments: Any, **options: Any) -> str:
        assert event.wait(60)
        return original(*arguments, **options)

    monkeypatch.setattr(identity, "fingerprint_of", identify)
    monkeypatch.setattr(rig, "await_links", lambda _: None)
    yield event
    event.set()


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return {"model": {"model_path": str(folder), "revision": None}}


def test_until_the_digest_is_known_pages_miss(
    server: ServerProcess, known: threading.Event, model: dict[str, Any]
) -> None:
    """SGLang's calls return at once. When the digest is known, they use the server."""
    with attach(server.endpoint, kv_pool(seed=1), arguments=model) as storage:
        assert storage.batch_exists(KEYS) == 0
        assert storage.batch_set_v1(KEYS, rows(*range(6))) == [False] * 6
        assert storage.batch_get_v1(KEYS, rows(*range(6))) == [False] * 6
        known.set()
        await_links(storage)
        assert all(storage.batch_set_v1(KEYS, rows(*range(6))))
        assert storage.batch_exists(KEYS) == 6


def test_a_clear_before_the_digest_is_known(
    server: ServerProcess, known: threading.Event, model: dict[str, Any]
) -> None:
    """The storage never enters the namespace of the files, because the weights may be others."""
    with attach(server.endpoint, kv_pool(seed=1), arguments=model) as first:
        known.set()
        await_links(first)
        assert all(first.batch_set_v1(KEYS, rows(*range(6))))
    known.clear()
    with attach(server.endpoint, kv_pool(), arguments=model) as storage:
        before = storage._connecting
        storage.clear()
        known.set()
        await_links(storage)
        assert before is not None
        assert before.wait(60) is False
        assert storage._links
        assert storage.batch_exists(KEYS) == 0
        wait_until(lambda: len(server.status().sessions) == 1)


def test_an_end_before_the_digest_is_known(
    server: ServerProcess, known: threading.Event, model: dict[str, Any]
) -> None:
    """A connection that comes later is closed."""
    with attach(server.endpoint, kv_pool(), arguments=model) as storage:
        storage.close()
        known.set()
        await_links(storage)
        assert not storage._links
        wait_until(lambda: not server.status().sessions)


def test_files_that_changed_after_the_start_disable_the_storage(
    server: ServerProcess, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning has the cause."""
    monkeypatch.setattr(identity, "process_started_at", lambda: 0.0)
    with attach(server.endpoint, kv_pool(), arguments=model) as storage:
        assert storage.batch_exists(KEYS) == 0
    assert caplog.text.count("the storage is disabled, every page is a miss") == 1
    assert "has changed since the process began" in caplog.text
