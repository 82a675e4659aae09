"""Model of the engines: the model of the demo, with 47 million random weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["make_model"]

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model.py"


def make_model(directory: Path) -> None:
    """Saves the model. Its weights are scaled so that one wrong KV block changes the answer."""
    spec = importlib.util.spec_from_file_location("demo_model", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make_model(directory)
