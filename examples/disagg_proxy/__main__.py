"""``python examples/disagg_proxy``, or ``python -m disagg_proxy`` where this package is found."""

import sys
from pathlib import Path

if not __package__:  # started as a folder: its modules are to know each other as a package all the same
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from disagg_proxy.program import main

if __name__ == "__main__":
    sys.exit(main())
