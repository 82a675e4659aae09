"""Fuzzes one target: `python -m fuzz.target NAME SECONDS DIRECTORY [libFuzzer arguments]`."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import atheris

SETTLE_SECONDS = 15.0

with atheris.instrument_imports(include=["kvtier.protos", "kvtier.server", "kvtier.tiers"]):
    # their own imports are not instrumented
    from fuzz import calls, disks, parsers

TARGETS: dict[str, Any] = {
    "calls": (calls.Calls, calls.seeds),
    "memory": (calls.Memory, calls.seeds),
    "parsers": (parsers.Parsers, parsers.seeds),
    "disks": (disks.Disks, disks.seeds),
}


def main() -> None:
    """Fuzzes until the time is over; exits with 0 if nothing was found."""
    name, seconds, directory = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    make, seeds = TARGETS[name]
    corpus = directory / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number:03d}").write_bytes(seed)
    work = directory / "w"
    work.mkdir()
    target = make(work)
    ends_at = time.monotonic() + seconds
    inputs, settled_at = 0, time.monotonic()
    faulthandler.enable()

    def one(data: bytes) -> None:
        nonlocal inputs, settled_at
        inputs += 1
        try:
            target.run(data)
            now = time.monotonic()
            if now < ends_at and now - settled_at < SETTLE_SECONDS:
                return
            figures = target.settle()
            settled_at = now
            if now >= ends_at:
                target.close()
                print(f"fuzz {name}: {inputs:,} inputs in {seconds:.0f} s, nothing found; {figures}", flush=True)
                os._exit(0)
        except BaseException:
            # libFuzzer keeps the input and ends the process, so the error is printed first.
            traceback.print_exc()
            sys.stderr.flush()
            raise

    artifacts = f"-artifact_prefix={directory}/"
    options = ["-timeout=60", "-rss_limit_mb=2048", "-max_len=4096", "-print_final_stats=0", "-verbosity=0", artifacts]
    # With files libFuzzer runs these and ends; it accepts either files or directories.
    atheris.Setup([sys.argv[0], *options, *(sys.argv[4:] or [str(corpus)])], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
