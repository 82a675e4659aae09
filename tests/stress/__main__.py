"""`python -m stress` (`make stress`, `make torture`): exits with 0 if all checks passed, else 1."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

from stress.orchestrator import Orchestrator
from stress.plan import ACKNOWLEDGEMENTS_PER_KILL, LARGE, Plan, is_warm, rounds_of
from stress.report import ledger, live_line, show
from stress.verdict import checks_of, passed, to_json


def main() -> int:
    """Runs it, prints what it found, writes JSON; returns the exit code."""
    options = _parser().parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"SEED={seed}", flush=True)
    rounds = []
    for plan in _plans(seed, options):
        directory = Path(tempfile.mkdtemp(prefix="kvt-", dir=options.directory))
        facts = Orchestrator(directory, plan, live_line).run()
        live_line("")
        rounds.append((facts, checks_of(facts)))
        show(*rounds[-1], whole=options.kills <= plan.kills)
        if passed(rounds[-1][1]):
            shutil.rmtree(directory)
        else:
            print(f"the journal, the logs and the data are in {directory}", flush=True)
    ok = all(passed(checks) for _, checks in rounds)
    if options.kills:
        print(f"all rounds ({len(rounds)}): {ledger([facts for facts, _ in rounds])}")
    print("passed" if ok else f"FAILED; the seed was {seed}")
    if options.json:
        found = [to_json(facts, checks) for facts, checks in rounds]
        whole = {"ok": ok, "seed": seed, "rounds": found} if options.kills else found[0]
        options.json.write_text(json.dumps(whole, indent=1, default=vars) + "\n")
    return 0 if ok else 1


def _parser() -> argparse.ArgumentParser:
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
    parser.add_argument("--large", choices=LARGE, help="the tier that holds all blocks (follows from the seed)")
    parser.add_argument(
        "--warm",
        action=argparse.BooleanOptionalAction,
        help="whether a keeper holds the memory of the CPU tier (follows from the seed)",
    )
    parser.add_argument("--seed", type=int, help="what all choices follow from (a random number)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found here")
    parser.add_argument("--directory", type=Path, help="where sockets and data go; short (a temporary directory)")
    return parser


def _plans(seed: int, options: argparse.Namespace) -> list[Plan]:
    if options.kills:
        wanted = options.acknowledgements
        if wanted is None:
            wanted = ACKNOWLEDGEMENTS_PER_KILL * options.kills
        return rounds_of(seed, options.kills, wanted, options.large, warm=options.warm)
    warm = is_warm(seed) if options.warm is None else options.warm
    return [Plan(seed, options.large or LARGE[seed % 2], seconds=options.seconds, warm=warm)]


if __name__ == "__main__":
    sys.exit(main())
