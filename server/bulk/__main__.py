"""Entry point `python -m kvtier.server.bulk`; started by the server only."""

import sys

from .main import main

if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
