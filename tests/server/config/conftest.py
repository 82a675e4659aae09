from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str) -> Path:
        path = tmp_path / "kvtier.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file
