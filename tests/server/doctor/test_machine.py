"""Facts about a machine that `kvtier doctor` reads from the kernel, with simulated files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvtier.server.doctor import engine_checks, machine


class TestMachine:
    @pytest.mark.parametrize(
        ("files", "cores", "memory"),
        [
            ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
            ({"cpu.max": "50000 100000", "memory.max": "1073741824"}, 0.5, 1 << 30),
            (
                {
                    "cpu/cpu.cfs_quota_us": "200000",
                    "cpu/cpu.cfs_period_us": "100000",
                    "memory/memory.limit_in_bytes": "1048576",
                },
                2.0,
                1 << 20,
            ),
            (
                {
                    "cpu/cpu.cfs_quota_us": "-1",
                    "cpu/cpu.cfs_period_us": "100000",
                    "memory/memory.limit_in_bytes": "9223372036854771712",
                },
                None,
                None,
            ),
            ({}, None, None),
        ],
    )
    def test_control_groups(
        self, tmp_path: Path, files: dict[str, str], cores: float | None, memory: int | None
    ) -> None:
        """Memory limits of both versions of control groups, and no limit."""
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        assert (machine.cpu_limit(tmp_path), machine.memory_limit(tmp_path)) == (cores, memory)

    def test_file_systems(self, tmp_path: Path) -> None:
        """The innermost mount counts; the kernel's list escapes spaces."""
        mounts = tmp_path / "mountinfo"
        mounts.write_text(
            "22 1 8:1 / / rw - ext4 /dev/sda rw\n"
            "23 22 0:5 / /data rw shared:1 - nfs4 host:/x rw\n"
            "24 23 8:2 / /data/my\\040disk rw - xfs /dev/sdb rw\n"
        )
        paths = {"/home": "ext4", "/data/x": "nfs4", "/data/my disk/x": "xfs", "/database": "ext4"}
        assert {path: machine.file_system(Path(path), mounts) for path in paths} == paths

    def test_the_lists_of_hashes_agree(self) -> None:
        """Server and connector each have one: the server imports neither client nor vLLM."""
        source = (Path(__file__).parents[3] / "client/engines/vllm/groups.py").read_text()
        [taken] = [
            ast.literal_eval(node.value)
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REPRODUCIBLE_HASHES"
        ]
        assert set(taken) == set(engine_checks._REPRODUCIBLE)
