"""Engines share pages only if equal keys mean equal bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.server_process import ServerProcess
from rig import (
    HEADS,
    PAGE,
    attach,
    engine_arguments,
    hashes,
    kv_pool,
    latent_pool,
    mamba_pool,
    rows,
    spaces_of,
    storage_config,
)
from sglang.version import __version__ as sglang_version

from kvtier.client import Group, GroupKind, Namespace
from kvtier.client.engines.failures import Unsupported
from kvtier.client.engines.identity import SCHEME, namespace_digest
from kvtier.client.engines.sglang import namespace
from kvtier.client.engines.sglang.config import StorageConfig
from kvtier.client.engines.sglang.layout import _FORMAT, KV, MAMBA, HostPool
from kvtier.client.engines.sglang.namespace import prepare_spaces

KEYS = hashes("prompt", 6)


class OrderedSet(set[str]):
    """A set with a fixed order. Otherwise each process has another one."""

    def __init__(self, order: list[str]) -> None:
        super().__init__(order)
        self._order = order

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)


def adapters(*folders: Path) -> dict[str, Any]:
    """Returns the arguments of an engine that loads these adapters when it starts."""
    paths = [{"lora_id": path.name, "lora_name": path.name, "lora_path": str(path)} for path in folders]
    return {"lora": {"enable_lora": True, "lora_paths": paths}}


def train(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def pages_found(server: ServerProcess, arguments: dict[str, Any]) -> int:
    with attach(server.endpoint, kv_pool(), arguments=arguments) as storage:
        return storage.batch_exists(KEYS)


def store_pages(server: ServerProcess, arguments: dict[str, Any]) -> None:
    with attach(server.endpoint, kv_pool(seed=1), arguments=arguments) as storage:
        assert all(storage.batch_set_v1(KEYS, rows(*range(6))))


def test_each_field_of_the_namespaces() -> None:
    """A model with latent attention and Mamba states, in the second of two ranks and stages.

    The tokens of a page are those of the KV: a page of the Mamba pool is one state.
    """
    kv, states = latent_pool(), mamba_pool(layout="page_first")
    ranks = {"tp_size": 2, "tp_rank": 1, "pp_size": 3, "pp_rank": 1, "is_mla_model": True}
    own = StorageConfig(tenant="red")
    split, shared = spaces_of((KV, kv), (MAMBA, states), settings=own, version="7", **ranks)
    assert [(space.rank, [pool.name for pool in space.pools]) for space in (split, shared)] == [
        (1, [MAMBA]),
        (None, [KV]),
    ]
    common: dict[str, Any] = {
        "model": "tiny",
        "dtype": "float16",
        "hash_scheme": "sglang:sha256:4",
        "revision": "a" * 40,
        "tenant": "red",
    }
    assert [replace(space.namespace, attributes={}) for space in (split, shared)] == [
        Namespace(
            groups=(Group(sum(HostPool.probe(MAMBA, states).pieces), PAGE, MAMBA, GroupKind.STATE),),
            layout="sglang:page_first",
            world_size=2,
            **common,
        ),
        Namespace(
            groups=(Group(sum(HostPool.probe(KV, kv).pieces), PAGE, KV, GroupKind.FULL_ATTENTION),),
            layout="sglang:page_first_direct",
            world_size=1,
            **common,
        ),
    ]
    for space, size in ((split, "2"), (shared, "1")):
        attributes = dict(space.namespace.attributes)
        assert len(attributes.pop("pools")) == len(attributes.pop("settings")) == 64
        assert attributes == SCHEME | {
            "engine": f"sglang {sglang_version}",
            "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
            "pipeline": "1 of 3",
            "tensor_parallel_size": size,
            "weights_version": "7",
            "weights": f"commit {'a' * 40}",
        }


def digests_of(*pools: tuple[str, Any], **changes: Any) -> list[str]:
    return [namespace_digest(space.namespace) for space in spaces_of(*pools, **changes)]


def test_ranks_and_groups_of_pools() -> None:
    """Ranks with different KV have a part each. Pools of one model are groups in their order."""
    assert [space.rank for space in spaces_of((KV, kv_pool()))] == [None]
    (space,) = spaces_of((KV, kv_pool()), ("swa", kv_pool(heads=1)), ("draft_swa", kv_pool()), tp_size=2, tp_rank=1)
    assert (space.rank, space.namespace.world_size) == (1, 2)
    windows = [GroupKind.SLIDING_WINDOW] * 2
    assert [group.kind for group in space.namespace.groups] == [GroupKind.FULL_ATTENTION, *windows]
    assert [group.name for group in space.namespace.groups] == [KV, "swa", "draft_swa"]
    assert space.namespace.groups[1].part_bytes * HEADS == space.namespace.groups[0].part_bytes
    assert digests_of((KV, kv_pool()), pp_size=2) != digests_of((KV, kv_pool()), pp_size=2, pp_rank=1)


@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize("name", [*_FORMAT, "kind"])
def test_the_format_of_each_pool_counts(name: str, changed: int) -> None:
    """Also of a later pool of the same size, and an attribute that the pool lacks."""

    def digests(value: object) -> list[str]:
        pools = [kv_pool(), kv_pool()]
        if name == "kind":
            pools[changed].__class__ = type(str(value), (type(pools[changed]),), {})
        probed = [HostPool.probe(own, pool) for own, pool in zip((KV, "swa"), pools, strict=True)]
        if name != "kind":
            setattr(pools[changed], name, value)
        made = prepare_spaces(storage_config({}), engine_arguments({}), StorageConfig(), probed, "")
        return [namespace_digest(space.namespace) for space in made()]

    assert digests(11) != digests(12)


@pytest.mark.parametrize("size", ["attn_cp_size", "dcp_size"])
def test_context_parallel_engines_are_refused(size: str) -> None:
    """A rank has some of the tokens of a page."""
    config = storage_config({})
    setattr(config, size, 2)  # what SGLang demands of such a configuration changes between versions
    with pytest.raises(Unsupported, match="context parallelism"):
        prepare_spaces(config, engine_arguments({}), StorageConfig(), [HostPool.probe(KV, kv_pool())], "")


def test_the_name_of_a_model() -> None:
    """The setting is first, then SGLang's name, then the path."""
    names = [
        spaces_of((KV, kv_pool()), settings=StorageConfig(model_name=own), model_name=served)[0].namespace.model
        for own, served in (("own", "served"), ("", "served"), ("", None))
    ]
    assert names == ["own", "served", "tiny"]


def test_engines_on_other_devices_or_of_another_version_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and the format of a page may differ. Two generations of a GPU are two devices."""
    gpu = {"device": {"device": "cuda"}}
    digests = digests_of((KV, kv_pool())) + digests_of((KV, kv_pool()), arguments=gpu)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other")
    digests += digests_of((KV, kv_pool()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        digests += digests_of((KV, kv_pool()), arguments=gpu)
    monkeypatch.setattr(namespace, "sglang_version", "0.5.24")
    digests += digests_of((KV, kv_pool()))
    assert len(set(digests)) == len(digests) == 6


COUNTED = {
    "model": ("dtype", "kv_cache_dtype", "quantization", "weight_version", "trust_remote_code"),
    "exec.attention": ("attention_backend", "prefill_attention_backend", "page_size"),
    "exec.graph": ("enable_torch_compile",),
    "memory": ("page_size", "enable_hisparse", "hisparse_config"),
    "exec.overlap": ("forward_hooks",),
    "speculative": ("speculative_algorithm", "speculative_draft_model_path"),
    "lora": ("lora_target_modules", "max_lora_rank"),
    "multimodal": ("mm_attention_backend",),
    "new group": ("new argument",),
}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in COUNTED.items() for name in names])
def test_each_argument_that_changes_the_kv_counts(group: str, name: str) -> None:
    """Also one in a group whose other arguments are neutral."""
    values = [digests_of((KV, kv_pool()), arguments={group: {name: value}}) for value in ("one", "other")]
    assert values[0] != values[1]


def test_a_retrained_adapter_shares_no_pages(server: ServerProcess, tmp_path: Path) -> None:
    """SGLang's id of an adapter is its name and path, so its files are part of the namespace."""
    one, two = train(tmp_path / "one", b"1"), train(tmp_path / "two", b"2")
    store_pages(server, adapters(one, two))
    assert pages_found(server, adapters(two, one)) == 6
    assert pages_found(server, adapters(one)) == pages_found(server, {}) == 0
    train(one, b"3")
    assert pages_found(server, adapters(one, two)) == 0


def test_engines_of_other_weights_share_no_pages(server: ServerProcess, tmp_path: Path) -> None:
    """The content of a folder counts, and the commit of a model on a hub."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"1")
    local = {"model": {"model_path": str(model), "revision": None}}
    store_pages(server, local)
    assert pages_found(server, local) == 6
    (model / "model.safetensors").write_bytes(b"2")
    assert pages_found(server, local) == 0
    store_pages(server, {})
    assert pages_found(server, {"model": {"revision": "b" * 40}}) == 0


def test_arguments_that_change_the_kv(server: ServerProcess) -> None:
    """Each argument counts unless it is known to be neutral, also one of a later SGLang."""
    store_pages(server, {})
    for arguments in (
        {"model": {"dtype": "bfloat16"}},
        {"model": {"custom_weight_loader": ["package.loader"]}},
        {"model": {"model_loader_extra_config": '{"key": 1}'}},
        {"exec.moe": {"kt_method": "AMXINT4"}},
        {"exec.moe": {"enable_w4a4_mxfp4_megamoe": True}},
        {"exec.new": {"new": 1}},
        {"serving": {"weight_version": "2"}},
        {"device": {"device": "xpu"}},
    ):
        assert pages_found(server, arguments) == 0, arguments


def test_arguments_that_change_nothing(server: ServerProcess) -> None:
    """Ports, seeds and sizes can differ between engines, and the order of a set at each start."""
    modules = [OrderedSet(["q_proj", "k_proj"]), OrderedSet(["k_proj", "q_proj"])]
    store_pages(server, {"lora": {"lora_target_modules": modules[0]}})
    for arguments in (
        {"serving": {"port": 1}},
        {"device": {"random_seed": 7}},
        {"parallel": {"nccl_port": 5}},
        {"observability": {"log_level": "debug"}},
        {"memory": {"hicache_ratio": 3.0}},
        {"model": {"download_dir": "/elsewhere"}},
    ):
        assert pages_found(server, arguments | {"lora": {"lora_target_modules": modules[1]}}) == 6, arguments


def test_files_that_arguments_name(server: ServerProcess, tmp_path: Path) -> None:
    """A change of a file, or of weights in a folder, changes the namespace."""
    scales, experts = tmp_path / "scales.json", tmp_path / "experts"
    experts.mkdir()
    arguments = {"model": {"quantization_param_path": str(scales)}, "exec.moe": {"kt_weight_path": str(experts)}}
    for content in (b"1", b"2"):
        scales.write_bytes(content)
        assert pages_found(server, arguments) == 0
        (experts / "0.safetensors").write_bytes(content)
        assert pages_found(server, arguments) == 0
        store_pages(server, arguments)
        assert pages_found(server, arguments) == 6


def test_words_that_are_also_files(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with the name of a value is no part of the namespace. Relative paths are."""
    monkeypatch.chdir(tmp_path)
    arguments = {
        "exec.mamba": {"mamba_backend": "triton"},
        "model": {"quantization_param_path": "scales.json"},
        "exec.moe": {"kt_weight_path": "experts"},
    }
    store_pages(server, arguments)
    Path("triton").mkdir()
    assert pages_found(server, arguments) == 6
    for path in (Path("scales.json"), Path("experts")):
        path.write_text("{}")
        assert pages_found(server, arguments) == 0
        path.unlink()


def test_a_value_of_an_unknown_type_disables_the_storage(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Its text could contain an address, which differs between processes."""
    assert pages_found(server, {"exec.new": {"path": Path("/a"), "dtype": torch.float16}}) == 0
    assert "the storage is disabled" not in caplog.text
    assert pages_found(server, {"exec.new": {"new": object()}}) == 0
    assert "the storage is disabled" in caplog.text
    assert "unknown type: object" in caplog.text


def test_adapters_that_sglang_ignores(server: ServerProcess, tmp_path: Path) -> None:
    """With `--enable-lora false` SGLang does not even parse the adapters."""
    store_pages(server, {"lora": {"enable_lora": False, "lora_paths": [f"one={tmp_path}"]}})
    assert pages_found(server, {}) == 6


def test_an_unreadable_adapter_disables_the_storage(
    server: ServerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the adapter's files its content is unknown. The warning names the adapter."""
    assert pages_found(server, adapters(tmp_path / "absent")) == 0
    assert "the storage is disabled" in caplog.text
    assert "cannot identify the LoRA adapter 'absent'" in caplog.text
