"""Runs the router: `python examples/kv_aware_router`, or `python -m kv_aware_router`."""

import sys
from pathlib import Path

if not __package__:  # started as a folder: the modules need their package for relative imports
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from kv_aware_router.program import main

if __name__ == "__main__":
    sys.exit(main())
