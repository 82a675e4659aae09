"""`kvtier size`: what it computes from a model's config.json, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvtier.server import cli
from kvtier.server.commands import console
from kvtier.server.commands.parser import new_parser
from kvtier.server.commands.size import DTYPES, LMDB_SHARE
from kvtier.server.config.units import GIB
from kvtier.tiers.lmdb.tier import PAYLOAD_SHARE

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "sizing.md").read_text()

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = LLAMA_8B | {
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
}
GEMMA_3_12B = {
    "text_config": {
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "hidden_size": 3840,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
    "torch_dtype": "bfloat16",
}
QWEN_3_NEXT = LLAMA_8B | {"num_hidden_layers": 48, "num_key_value_heads": 2, "head_dim": 256}


@pytest.fixture
def size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on a config.json of these settings; returns what it printed as JSON."""

    def run(config: dict[str, Any], *flags: str) -> Any:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        assert cli.main(["size", str(file), "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [
        (LLAMA_8B, (), 131_072),
        (LLAMA_8B, ("--dtype", "fp8"), 65_536),
        (LLAMA_8B | {"dtype": "float32"}, (), 262_144),
        (LLAMA_8B | {"num_key_value_heads": None}, (), 524_288),
        (LLAMA_8B | {"head_dim": 64}, (), 65_536),
        (DEEPSEEK_V3, (), 70_272),
        (GEMMA_3_12B, (), 393_216),
        (QWEN_3_NEXT | {"full_attention_interval": 4}, (), 24_576),
        (QWEN_3_NEXT | {"layer_types": ["linear_attention", "full_attention"] * 24}, (), 49_152),
        (LLAMA_8B | {"num_kv_shared_layers": 16}, (), 65_536),
    ],
)
def test_bytes_per_token(size: Any, config: dict[str, Any], flags: tuple[str, ...], expected: int) -> None:
    """2 x layers x KV heads x head size x bytes of a value; MLA stores one vector per layer."""
    assert size(config, *flags)["bytes_per_token"] == expected


def test_layers_without_full_attention_are_counted_apart(size: Any) -> None:
    """Layers with a sliding window count in the sum; layers with states do not."""
    found = size(GEMMA_3_12B)
    assert (found["layers"], found["window_layers"], found["state_layers"]) == (48, 40, 0)
    found = size(QWEN_3_NEXT | {"full_attention_interval": 4})
    assert (found["layers"], found["window_layers"], found["state_layers"]) == (12, 0, 36)


def test_ranks_share_the_kv_heads(size: Any) -> None:
    """If there are more ranks than heads, ranks have copies; MLA is stored once."""
    assert size(LLAMA_8B, "--tp", "2")["bytes_per_token_of_a_rank"] == 65_536
    assert size(LLAMA_8B, "--tp", "2")["bytes_per_token"] == 131_072
    assert size(LLAMA_8B, "--tp", "16")["bytes_per_token"] == 262_144
    assert size(DEEPSEEK_V3, "--tp", "8")["bytes_per_token"] == 70_272


def test_capacities_of_tiers_in_tokens(size: Any) -> None:
    """The region has slots of whole pages; an LMDB tier holds four fifths of its size."""
    found = size(LLAMA_8B, "--cpu", "64GiB", "--disk", "500GiB")
    assert found["bytes_per_block"] == 2 << 20
    assert found["cpu"] == {"bytes": 64 * GIB, "blocks": 32_768, "tokens": 524_288, "index_bytes": 32_768 * 501}
    assert found["disk"]["tokens"] == 3_276_800
    assert found["suggested_region_bytes"] == 32 * GIB
    odd = size(LLAMA_8B | {"head_dim": 100}, "--block-tokens", "1", "--cpu", "1GiB")
    assert odd["bytes_per_block"] == 102_400
    assert odd["cpu"]["blocks"] == GIB // 102_400
    assert LMDB_SHARE == PAYLOAD_SHARE


def test_the_text_has_a_line_per_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GEMMA_3_12B))
    assert cli.main(["size", str(file), "--cpu", "8GiB"]) == 0
    shown = capsys.readouterr().out
    assert "48 layers with KV, 8 KV heads of 256 values, bfloat16" in shown
    assert "40 of these layers have a sliding window" in shown
    assert "8.0 GiB holds 21,840 tokens" in shown


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ("{}", "has no num_hidden_layers"),
        (json.dumps(LLAMA_8B | {"num_hidden_layers": "32"}), "must be a whole number"),
        (json.dumps(LLAMA_8B | {"layer_types": ["full_attention", "new_attention"] * 16}), "new_attention"),
        (json.dumps(LLAMA_8B | {"layer_types": [[]] * 32}), "layers of these kinds"),
        (json.dumps(LLAMA_8B | {"attn_type_list": [0, 1]}), "attn_type_list"),
        (json.dumps(LLAMA_8B | {"torch_dtype": "int4"}), "--dtype"),
    ],
)
def test_an_unusable_model_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, reason: str
) -> None:
    """One line on standard error names the file and the reason."""
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    assert cli.main(["size", str(file)]) == console.EXIT_FAILURE
    [line] = capsys.readouterr().err.splitlines()
    assert str(file) in line
    assert reason in line


@pytest.mark.parametrize("size", ["8 apples", "0"])
def test_wrong_flags_are_refused(tmp_path: Path, size: str) -> None:
    """The check precedes reading the file."""
    assert cli.main(["size", str(tmp_path / "config.json"), "--cpu", size]) == console.EXIT_USAGE


def test_every_dtype_is_a_choice() -> None:
    """The parser repeats the names because it imports no command."""
    for dtype in DTYPES:
        assert new_parser().parse_args(["size", "config.json", "--dtype", dtype]).dtype == dtype


def test_the_table_of_the_sizing_page(size: Any) -> None:
    """The figures of docs/sizing.md are those of the command."""
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 10
    for name, layers, heads, head_size, token, tokens in rows:
        config = LLAMA_8B | {"num_hidden_layers": int(layers), "num_key_value_heads": int(heads)}
        config |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64} if "MLA" in name else {"head_dim": int(head_size)}
        found = size(config, "--cpu", "64GiB")
        assert (f"{found['bytes_per_token']:,}", f"{found['cpu']['tokens']:,}") == (token, tokens), name


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (LLAMA_8B, "--cpu 32GiB --disk 500GiB"),
        (LLAMA_8B | {"num_hidden_layers": 80}, "--tp 4 --cpu 96GiB --disk 2TiB"),
        (DEEPSEEK_V3, "--tp 8 --block-tokens 64 --cpu 32GiB --disk 1TiB"),
    ],
)
def test_the_examples_of_the_sizing_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], flags: str
) -> None:
    """The examples of docs/sizing.md are the output of the command."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert cli.main(["size", str(file), *flags.split()]) == 0
    assert f"`kvtier size config.json {flags}`:\n\n```\n{capsys.readouterr().out}```\n" in PAGE
