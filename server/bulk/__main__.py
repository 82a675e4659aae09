"""`python -m kvtier.server.bulk`: started by the server, never by people."""

import sys

from .process import main

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
