"""Makes `python -m kvtier.server` the same as `kvtier`."""

import sys

from .cli import main

sys.exit(main())
