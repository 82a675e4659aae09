"""Long run of the simulation.

PYTHONPATH=src python tests/client/offload/long_run.py FIRST LAST [STEPS]
"""

from __future__ import annotations

import sys

from offload_world import refill, run

from kvtier.client.offload import OffloadMode


def main(first: int, last: int, steps: int = 1500) -> None:
    """Runs these seeds; stops at the first failure."""
    for seed in range(first, last):
        print(f"\rseed {seed}", end="", flush=True)
        run(seed, steps)
        for mode in OffloadMode:
            refill(seed, steps, mode)
    print(f"\r{last - first} lives of {steps} steps: nothing broke")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
