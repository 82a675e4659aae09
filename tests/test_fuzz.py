"""The fuzz targets without a fuzzer: their seeds pass, and a planted defect is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In its own process, because the target's server uses the logging and memory of its process.
RUN = """
import shutil, tempfile, traceback
from pathlib import Path
from fuzz import {module} as module
{plant}
directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="kvf-"))
try:
    target = module.{target}(directory)
    for seed in module.seeds():
        target.run(seed)
    print(target.settle())
    target.close()
except Exception:
    traceback.print_exc()  # the server logs uncaught errors elsewhere
    raise
finally:
    shutil.rmtree(directory)
"""

CALLS = """
from kvtier.server.services.cache import CacheService
async def lookup(*_):
    raise ZeroDivisionError("planted")
CacheService.Lookup = lookup
"""
ANY_NUMBER = """
from kvtier.server.rpc import socket_calls
from kvtier.protos.wire.socket_frames import unpack_head
socket_calls.unpack_call_head = lambda head, _: unpack_head(head)[::2]
"""
PARSERS = """
from kvtier.protos.wire import socket_frames
socket_frames.unpack_hello = lambda data: data[99]
"""
DISKS = """
from kvtier.tiers.disk.tier import DiskTier
load = DiskTier.load
def damaging(self, blocks):
    outcomes = load(self, blocks)
    blocks[0].parts[0][0] ^= 1
    return outcomes
DiskTier.load = damaging
"""
TARGETS = {
    "calls": ("calls", "Calls"),
    "memory": ("calls", "Memory"),
    "parsers": ("parsers", "Parsers"),
    "disks": ("disks", "Disks"),
}
"""For each target, its module and its class."""
PLANTS = {
    "calls": ("calls", CALLS, "planted"),
    "any number": ("calls", ANY_NUMBER, "the server sends a frame of call"),
    "memory": ("memory", "module._MOST_GROWTH = -(1 << 40)", "MiB of memory"),
    "parsers": ("parsers", PARSERS, "IndexError"),
    "disks": ("disks", DISKS, "other bytes than were stored"),
}
"""For each defect, the target that finds it, the code that plants it, and a part of the error."""


def run(name: str, plant: str = "") -> subprocess.CompletedProcess[str]:
    module, target = TARGETS[name]
    code = RUN.format(module=module, target=target, plant=plant)
    root = Path(__file__).resolve().parents[1]
    environment = {"PYTHONPATH": f"{root / 'src'}:{root / 'tests'}", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, timeout=100
    )


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_pass(name: str) -> None:
    """Valid input is answered, and nothing of it is kept."""
    done = run(name)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(("name", "plant", "wanted"), PLANTS.values(), ids=PLANTS)
def test_a_planted_defect_is_found(name: str, plant: str, wanted: str) -> None:
    done = run(name, plant)
    assert done.returncode != 0
    assert wanted in done.stderr
