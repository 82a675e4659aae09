"""Makes an engine store wrong KV under right keys, as a defect of an engine or adapter would.

The file that `KVTIER_TEST_WRONG_KV` names says what is wrong; if it is empty, nothing is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["FAULTS", "VARIABLE", "prepare_engine"]

VARIABLE = "KVTIER_TEST_WRONG_KV"
FAULTS = ("another block", "swapped layers", "swapped halves of pages", "shifted by one value")


def prepare_engine() -> None:
    from kvtier.client.engines.vllm.worker.copies import CpuCopier

    copy_out = CpuCopier.copy_out

    def copy_wrong(
        self: Any, group: int, block_ids: Sequence[int], memory: memoryview, offsets: Sequence[int], after: Any
    ) -> None:
        fault = Path(os.environ[VARIABLE]).read_text()
        if fault == "another block":
            block_ids = [block + 1 for block in block_ids]
        copy_out(self, group, block_ids, memory, offsets, after)
        segments = self._segments[group]
        layers, nbytes = sum(pages.shape[1] for pages, _, _ in segments), sum(size for _, _, size in segments)
        for offset in offsets:
            part, page = memory[offset : offset + nbytes], nbytes // layers
            whole = bytes(part)
            if fault == "swapped layers":
                part[:] = whole[page:] + whole[:page]
            elif fault == "swapped halves of pages":
                pages = (whole[start : start + page] for start in range(0, nbytes, page))
                part[:] = b"".join(each[page // 2 :] + each[: page // 2] for each in pages)
            elif fault == "shifted by one value":
                part[:] = whole[4:] + whole[:4]

    CpuCopier.copy_out = copy_wrong  # type: ignore[method-assign]
