"""KVTierStorage that runs a command of the test at a given moment, in the engine's process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from sglang_scenario import TRIGGER

from kvtier.client.engines.sglang import KVTierStorage, links

SECONDS = 120


def act(moment: str) -> None:
    """Runs the command, once, if the test waits for this moment."""
    path = Path(os.environ[TRIGGER])
    if path.exists():
        wanted, command = json.loads(path.read_text())
        if wanted == moment:
            subprocess.run(command, check=True, timeout=SECONDS)
            path.unlink()


class ActingStorage(KVTierStorage):
    """Moments: before a lookup ("asking"), a load ("between") or a copy ("loading", "storing")."""

    moment = ""

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        act("asking")
        return super().batch_exists(keys, extra_info)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        act("between")
        with _Copying("loading"):
            return super().batch_get_v1(keys, host_indices, extra_info)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        with _Copying("storing"):
            return super().batch_set_v1(keys, host_indices, extra_info)


class _Copying:
    def __init__(self, moment: str) -> None:
        self._moment = moment

    def __enter__(self) -> None:
        self._copy = links.copy_batch

        def copy(*batch: Any) -> None:
            act(self._moment)
            self._copy(*batch)

        links.copy_batch = copy

    def __exit__(self, *_: object) -> None:
        links.copy_batch = self._copy
