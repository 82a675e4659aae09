"""A model with sliding windows for which SGLang has a pool of its own, also on a CPU.

SGLang keeps Gemma3's windows in the pool of the full attention, and runs Gemma4 on GPUs only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import common_sizes, randomize

__all__ = ["WINDOW", "make_windows"]

WINDOW = 128
LAYERS = 6


def make_windows(path: Path) -> None:
    """Writes a Mellum with dense layers: two of three layers have a window."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_hidden_layers=LAYERS, mlp_only_layers=list(range(LAYERS)), num_experts=2, **common_sizes()
    )
    model = Qwen3MoeForCausalLM(config)
    randomize(model, normed=False)
    model.save_pretrained(path)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    kinds = ["full_attention" if number % 3 == 2 else "sliding_attention" for number in range(LAYERS)]
    mellum: dict[str, Any] = {
        "architectures": ["MellumForCausalLM"],
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] * LAYERS,
        "rope_parameters": dict.fromkeys(set(kinds), rope),
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    }
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | mellum))
