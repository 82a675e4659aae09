"""`python -m stress` (`make stress`): exits with 0 if all checks passed, else 1."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

from stress.orchestrator import Orchestrator, Plan
from stress.report import live_line, show
from stress.verdict import checks_of, passed, to_json

ACKNOWLEDGEMENTS_PER_KILL = 180


def main() -> int:
    """Runs it, prints the table, writes JSON; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m stress",
        description="Mixed load on a real server, with SIGKILLs on both sides, and a verdict.",
        epilog="The seed determines every choice. The timing differs, so equal seeds do not give equal runs.",
    )
    parser.add_argument("--seconds", type=float, default=600, help="how long the load lasts (600)")
    parser.add_argument(
        "--kills", type=int, default=0, help="torture: kill only the server, so often, instead of --seconds"
    )
    parser.add_argument(
        "--acknowledgements",
        type=int,
        help=f"torture: how many blocks must be acknowledged as durable ({ACKNOWLEDGEMENTS_PER_KILL} per kill)",
    )
    parser.add_argument("--large", choices=("lmdb", "disk"), help="the tier that holds all blocks (drawn)")
    parser.add_argument("--seed", type=int, help="what all choices follow from (a random number)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found here")
    parser.add_argument("--directory", type=Path, help="where sockets and data go; short (a temporary directory)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"SEED={seed}", flush=True)
    wanted = options.acknowledgements
    if wanted is None:
        wanted = ACKNOWLEDGEMENTS_PER_KILL * options.kills
    seconds = 0.0 if options.kills else options.seconds
    plan = Plan(seed, seconds, kills=options.kills, acknowledgements=wanted, large=options.large)
    directory = Path(tempfile.mkdtemp(prefix="kvt-", dir=options.directory))
    facts = Orchestrator(directory, plan, live_line).run()
    checks = checks_of(facts)
    live_line("")
    show(facts, checks)
    if options.json:
        options.json.write_text(json.dumps(to_json(facts, checks), indent=1, default=vars) + "\n")
    if passed(checks):
        shutil.rmtree(directory)
    else:
        print(f"the journal, the logs and the data are in {directory}")
    return 0 if passed(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
