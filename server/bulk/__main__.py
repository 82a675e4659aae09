"""`python -m kvtier.server.bulk`: started by the server, never by people."""

import sys

from .main import main

if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
