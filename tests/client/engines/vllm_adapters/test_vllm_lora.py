"""LoRA adapters: keys name the content of the adapter with which the engine computed a block."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connector_fakes import UNKNOWN_ADAPTER, FakeClient, make_request, make_step, scheduler_side
from handoff_engine import BLOCK, FIRST_TURN, ToyEngine
from harness.polling import wait_until
from server_process import ServerProcess

from kvtier.client.engines.file_digests import fingerprint_of
from kvtier.client.engines.identity import InBackground
from kvtier.client.engines.vllm import lora
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.lora import LoraAdapters
from kvtier.client.engines.vllm.worker.reports import WorkerReport

pytestmark = pytest.mark.usefixtures("digests_are_awaited")

PROMPT = list(range(100, 100 + 4 * BLOCK + 1))
LAST = 1  # the engine always computes the last token
MakeEngine = Callable[[str], ToyEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeEngine]:
    server, engines = ServerProcess(tmp_path, "64MiB"), []
    server.start()

    def make(name: str) -> ToyEngine:
        engines.append(ToyEngine(server.endpoint, name, ConnectorConfig(bidirectional_kv_xfer=True)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    server.kill()


def write(folder: Path, content: str) -> None:
    """Writes an adapter's files, at another time than before."""
    folder.mkdir(exist_ok=True)
    path = folder / "adapter_model.safetensors"
    before = path.stat().st_mtime if path.exists() else 0.0
    (folder / "adapter_config.json").write_text("{}")
    path.write_text(content)
    os.utime(path, (before + 10, before + 10))


def adapter(name: str, folder: Path, number: int = 1, **fields: Any) -> Any:
    """Fields of vLLM's `LoRARequest`, and in `weights` what the engine has loaded."""
    weights = (folder / "adapter_model.safetensors").read_text()
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder), weights=weights, **fields)


def test_blocks_are_found_by_requests_with_the_same_adapter_only(make: MakeEngine, tmp_path: Path) -> None:
    """The toy's hashes do not cover the adapter, so that only the tag tells its blocks apart."""
    for name in "ab":
        write(tmp_path / name, name)
    a, b = adapter("a", tmp_path / "a", 1), adapter("b", tmp_path / "b", 2)
    first, second = make("first"), make("second")
    assert first.run(PROMPT, adapter=a).computed == len(PROMPT)
    assert second.run(PROMPT).computed == second.run(PROMPT, adapter=b).computed == len(PROMPT)
    a.lora_int_id = 7  # ids are counted per engine
    for found in (a, b, None):
        assert second.run(PROMPT, adapter=found).computed == LAST


def test_a_request_with_an_adapter_is_handed_over(make: MakeEngine, tmp_path: Path) -> None:
    """B2.3: the decode engine pulls the blocks for the same adapter, the partial one too."""
    for name in "ab":
        write(tmp_path / name, name)
    a, b = adapter("a", tmp_path / "a", 1), adapter("b", tmp_path / "b", 2)
    prefill, decode = make("P"), make("D")
    params = prefill.run(PROMPT, FIRST_TURN, adapter=a).params
    assert decode.run(PROMPT, params, adapter=b).computed == len(PROMPT)
    params = prefill.run(PROMPT, FIRST_TURN, adapter=a).params
    assert decode.run(PROMPT, params, adapter=a).computed == 0


def test_an_adapter_with_other_content_under_its_name_and_path_finds_nothing(make: MakeEngine, tmp_path: Path) -> None:
    """Another engine has loaded the files after they had changed."""
    write(tmp_path / "a", "old")
    assert make("old").run(PROMPT, adapter=adapter("a", tmp_path / "a")).computed == len(PROMPT)
    write(tmp_path / "a", "new")
    new, changed = make("new"), adapter("a", tmp_path / "a")
    assert new.run(PROMPT, adapter=changed).computed == len(PROMPT)
    assert new.run(PROMPT, adapter=changed).computed == LAST


def test_an_adapter_that_may_differ_from_its_files_is_not_identified(tmp_path: Path) -> None:
    """Workers load an id once, and vLLM's prefix cache has KV of the old content until a reset."""
    a, b = tmp_path / "a", tmp_path / "b"
    write(a, "1")
    write(b, "2")
    adapters = LoraAdapters(RateLimitedLog())
    tag = adapters.tag_of(adapter("a", a))
    assert tag is not None
    assert adapters.tag_of(adapter("a", a, 3)) == tag
    assert adapters.tag_of(adapter("b", b)) is None, "another adapter with the same id"
    assert adapters.tag_of(adapter("b", b, 2)) is None, "the prefix cache may have KV of the refused request"
    write(a, "changed")
    assert adapters.tag_of(adapter("a", a)) is None, "the workers have the old content"
    assert adapters.tag_of(adapter("a", a, 4)) is None, "the prefix cache may have old blocks"
    adapters.reset()
    assert adapters.tag_of(adapter("a", a)) is None
    assert adapters.tag_of(adapter("a", a, 5)) is None, "the prefix cache may have KV of the refused request"
    adapters.reset()
    assert adapters.tag_of(adapter("a", a, 5)) not in (None, tag)
    assert adapters.tag_of(adapter("b", b, 2)) not in (None, tag)
    assert adapters.tag_of(UNKNOWN_ADAPTER) is None


def test_an_adapter_that_is_loaded_in_place_is_identified_after_a_reset(tmp_path: Path) -> None:
    write(tmp_path / "a", "1")
    adapters = LoraAdapters(RateLimitedLog())
    first = adapters.tag_of(adapter("a", tmp_path / "a", load_inplace=True))
    write(tmp_path / "a", "2")
    again = adapter("a", tmp_path / "a", load_inplace=True)
    assert adapters.tag_of(again) is None
    adapters.reset()
    assert adapters.tag_of(again) not in (None, first)


def test_until_an_adapter_is_read_its_requests_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not wait. Its prefix cache has KV of the content that is then known."""
    write(tmp_path / "a", "1")
    known = threading.Event()
    monkeypatch.setattr(lora, "InBackground", InBackground)
    monkeypatch.setattr(lora, "fingerprint_of", lambda folder: known.wait(60) and fingerprint_of(folder))
    adapters, used = LoraAdapters(RateLimitedLog()), adapter("a", tmp_path / "a")
    assert not adapters.loads(used)
    adapters.loaded(used)
    assert adapters.tag_of(used) is None
    known.set()
    wait_until(lambda: adapters.tag_of(used) is not None)
    known.clear()
    other = LoraAdapters(RateLimitedLog())
    assert other.tag_of(used) is None
    write(tmp_path / "a", "2")
    replacing = adapter("a", tmp_path / "a", 2)
    assert other.tag_of(replacing) is None
    known.set()
    assert other._fingerprints[str(tmp_path / "a")][1].wait(60)
    assert other.tag_of(replacing) is None, "the prefix cache has KV of the old content"


def test_a_change_with_the_old_size_and_time_is_noticed(tmp_path: Path) -> None:
    """A program can set the time of modification, but not the time of change."""
    write(tmp_path / "a", "1")
    adapters, used = LoraAdapters(RateLimitedLog()), adapter("a", tmp_path / "a")
    assert adapters.tag_of(used) is not None
    path = tmp_path / "a" / "adapter_model.safetensors"
    status = path.stat()

    def is_written() -> bool:  # until the file system's clock has moved on
        path.write_text("2")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        return path.stat().st_ctime_ns != status.st_ctime_ns

    wait_until(is_written)
    assert adapters.tag_of(used) is None


def test_only_the_first_request_with_an_adapter_that_is_loaded_in_place_loads_it(tmp_path: Path) -> None:
    """A later request with other files has KV of the first content in vLLM's prefix cache."""
    write(tmp_path / "a", "1")
    adapters, used = LoraAdapters(RateLimitedLog()), adapter("a", tmp_path / "a", load_inplace=True)
    tag = adapters.tag_of(used)
    assert adapters.tag_of(used) == tag
    assert adapters._loaded[1] is not None
    write(tmp_path / "a", "2")
    assert adapters.tag_of(used) is None
    write(tmp_path / "a", "3")
    assert adapters.tag_of(used) is None
    loaded = adapters._loaded[1]
    assert loaded is not None
    assert loaded[-1] != adapters._fingerprints[str(tmp_path / "a")][1], "workers have the content of the first request"


def test_a_later_request_does_not_load_another_adapter_in_place(tmp_path: Path) -> None:
    """Workers keep what the first request with the id has loaded, until a reset."""
    for name in "ab":
        write(tmp_path / name, name)
    adapters = LoraAdapters(RateLimitedLog())
    first, second = (adapter(name, tmp_path / name, load_inplace=True) for name in "ab")
    assert adapters.tag_of(first) is not None
    assert adapters.tag_of(second) is None
    adapters.reset()
    assert adapters.tag_of(second) is not None


def test_an_adapter_is_loaded_once_unless_it_says_otherwise(tmp_path: Path) -> None:
    """`loads` says whether the content of an id changes, so that its requests go stale."""
    write(tmp_path / "a", "1")
    adapters, used = LoraAdapters(RateLimitedLog()), adapter("a", tmp_path / "a")
    assert not adapters.loads(used)
    adapters.loaded(used)
    tag = adapters.tag_of(used)
    assert not adapters.loads(used), "vLLM does not load it again"
    adapters.loaded(used)
    assert adapters.tag_of(used) == tag is not None
    assert adapters.loads(adapter("a", tmp_path / "a", load_inplace=True))


def test_events_name_an_adapter_s_blocks_as_vllm_does(tmp_path: Path) -> None:
    """The tag is part of the key, and not of the hash in the event."""
    write(tmp_path / "a", "1")
    hashes: list[list[Any]] = []
    for given in (None, adapter("a", tmp_path / "a")):
        with scheduler_side(FakeClient(), events=True) as (scheduler, _):
            scheduler.new_request(make_request(2, lora_request=given))
            (job,) = scheduler.build_step(make_step({"r": [[7, 8]]}, r=8)).saves
            scheduler.saves_reported(WorkerReport({job.job_id: 1}))
            hashes.append([event.block_hashes for event in scheduler.take_events()])  # type: ignore[attr-defined]
    assert hashes[0] == hashes[1] != []


def test_an_adapter_that_changes_after_its_load_is_not_identified(tmp_path: Path) -> None:
    """Workers load an adapter before its first request (`add_lora`)."""
    write(tmp_path / "a", "c0")
    used = adapter("a", tmp_path / "a")
    adapters = LoraAdapters(RateLimitedLog())
    assert not adapters.loads(used)
    adapters.loaded(used)
    assert adapters.tag_of(used) is not None
    write(tmp_path / "a", "c1")
    first = LoraAdapters(RateLimitedLog())
    assert not first.loads(used)
    first.loaded(used)
    write(tmp_path / "a", "c2")
    assert first.tag_of(used) is None
    again = adapter("a", tmp_path / "a", 2)
    first.loads(again)
    first.loaded(again)
    assert first.tag_of(again) is None, "the prefix cache may have KV of the refused request"
    first.reset()
    assert first.tag_of(again) is not None


def test_an_adapter_that_changes_during_its_load_is_not_identified(tmp_path: Path) -> None:
    write(tmp_path / "a", "c0")
    adapters, used = LoraAdapters(RateLimitedLog()), adapter("a", tmp_path / "a")
    adapters.loads(used)
    write(tmp_path / "a", "c1")
    adapters.loaded(used)
    assert adapters.tag_of(used) is None
    failed = adapter("a", tmp_path / "a", 2)
    adapters.loads(failed)  # and the load raises
    adapters.reset()
    assert adapters.tag_of(failed) is None


def test_files_that_come_back_after_a_load_are_not_those_that_were_loaded(tmp_path: Path) -> None:
    """Names, sizes and times are those of before the load; in between there were other files."""
    write(tmp_path / "a", "c0")
    adapters, used = LoraAdapters(RateLimitedLog()), adapter("a", tmp_path / "a")
    adapters.loads(used)
    (tmp_path / "a").rename(tmp_path / "kept")
    write(tmp_path / "a", "c1")
    adapters.loaded(used)
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "kept").rename(tmp_path / "a")
    assert adapters.tag_of(used) is None


def test_a_tag_names_the_adapter_and_its_path(tmp_path: Path) -> None:
    """Requests with two names of the same files share no blocks, as in vLLM's own prefix cache."""
    for folder in ("a", "b"):
        write(tmp_path / folder, "same")
    adapters = LoraAdapters(RateLimitedLog())
    names = [adapter("a", tmp_path / "a"), adapter("b", tmp_path / "a", 2), adapter("a", tmp_path / "b", 3)]
    tags = {adapters.tag_of(name) for name in names}
    assert len(tags - {None}) == 3


def test_no_blocks_of_a_changed_adapter_get_to_an_engine_with_the_old_one(make: MakeEngine, tmp_path: Path) -> None:
    """Load c0, overwrite the files with c1, then the first request: its KV is of c0."""
    write(tmp_path / "a", "c0")
    loaded = adapter("a", tmp_path / "a")
    first = make("first")
    first.scheduler.adapter_loads(loaded)
    first.scheduler.adapters.loaded(loaded)
    write(tmp_path / "a", "c1")
    first.run(PROMPT, adapter=loaded)
    second, changed = make("second"), adapter("a", tmp_path / "a")
    assert second.run(PROMPT, adapter=changed).computed == len(PROMPT)


@pytest.mark.parametrize("number", [1, 2])
def test_a_request_that_runs_while_its_adapter_is_replaced_is_not_saved(tmp_path: Path, number: int) -> None:
    """Its later blocks are computed with the new content. Requests with other adapters continue."""
    write(tmp_path / "a", "c0")
    used = adapter("a", tmp_path / "a")
    with scheduler_side(FakeClient()) as (scheduler, _):
        request = make_request(2, lora_request=used, num_computed_tokens=8, kv_transfer_params=FIRST_TURN)
        scheduler.new_request(request)
        scheduler.blocks_allocated(request, [[7, 8]], 0)
        write(tmp_path / "a", "c1")
        replacing = adapter("a", tmp_path / "a", number, load_inplace=True)
        scheduler.adapter_loads(adapter("b", tmp_path / "a", number))
        scheduler.adapter_loads(replacing)
        scheduler.adapters.loaded(replacing)
        adapted, is_used = scheduler._requests["r"], number == 2
        assert (adapted.may_load, adapted.may_save, adapted.may_pull, adapted.stale) == (*[is_used] * 3, not is_used)
        saves = scheduler.build_step(make_step({"r": [[7, 8]]}, r=8)).saves
        assert bool(saves) is is_used
        assert bool(scheduler.request_finished(request, [[7, 8]])) is is_used, "nothing is held either"
        hashes = [each for group in scheduler._pool._geometry.groups for each in adapted.hashes(group)]
        known = [scheduler._pool._tags[each] is not None for each in hashes]
        assert known == [is_used] * len(hashes) != [], "and lazy mode saves none of its blocks later"
        scheduler.saves_reported(WorkerReport({save.job_id: 1 for save in saves}))
