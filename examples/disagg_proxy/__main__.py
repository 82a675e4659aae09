"""Runs the proxy: `python examples/disagg_proxy`, or `python -m disagg_proxy`."""

import sys
from pathlib import Path

if not __package__:  # started as a folder: the modules need their package for relative imports
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from disagg_proxy.program import main

if __name__ == "__main__":
    sys.exit(main())
