"""Random requests that share prefixes, preempt one another and are aborted: `churn.py JOB OUT`.

Every answer is held against what an engine without a connector says. Now and then the engine is
left to rest, and looked at.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from engine_run import describe
from harness.polling import polls
from live_engine import LiveEngine
from scenario import TOLERANCE

AT_ONCE = 10
ABORTED = 0.4
"""The share of requests that are to be aborted, each at a moment of its own; some end before it
comes."""
ALONE = 0.15
"""The share of requests that share no blocks with others, so that all of the prompt is computed, in
chunks."""
STEPS_BETWEEN_RESTS = 400
SETTLE_SECONDS = 60.0
RESET_SECONDS = 20.0
EXTRA_SECONDS = 150.0
"""What it takes longer at most until every moment has come: on a slow machine a minute has few
steps."""
MOMENTS = ("arrived", "waiting", "loading", "prefill", "decode")


class Churn:
    """One engine under random load; `reference` has the prompts and the expected answers."""

    def __init__(self, live: LiveEngine, reference: list[dict[str, Any]], seed: int) -> None:
        self.live, self.reference, self.rng = live, reference, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.prompts: dict[str, int] = {}
        """Requests that have not ended, each with the number of its prompt."""
        self.doomed: dict[str, str] = {}
        """Requests to abort, with the moment."""

    def run(self, seconds: float) -> None:
        """Runs for this many seconds, then until aborts hit every moment, then until idle."""
        end = time.monotonic() + seconds
        while time.monotonic() < end or (self._has_more_to_come and time.monotonic() < end + EXTRA_SECONDS):
            while len(self.prompts) < AT_ONCE and self.rng.random() < 0.7:
                self._arrive()
            self._step()
            if self.counts["steps"] % STEPS_BETWEEN_RESTS == 0:
                self._rest()
        self._rest()

    @property
    def _has_more_to_come(self) -> bool:
        return not all(self.counts[f"aborted {moment}"] for moment in MOMENTS)

    def _arrive(self) -> None:
        number, name = self.rng.randrange(len(self.reference)), f"c{self.counts['arrived']}"
        self.counts["arrived"] += 1
        row = self.reference[number]
        self.prompts[name] = number
        salt = name if self.rng.random() < ALONE else None
        self.live.add(name, row["prompt"], self.rng.randint(1, len(row["tokens"])), salt)
        if self.rng.random() < ABORTED:
            moment = self.rng.choice(MOMENTS)
            if moment == "arrived":
                self._abort(name, moment)
            else:
                self.doomed[name] = moment

    def _step(self) -> None:
        self.counts["steps"] += 1
        for output in self.live.step():
            name = output.request_id
            if name in self.prompts:
                self._check(describe(output), self.reference[self.prompts.pop(name)], name)
                self.doomed.pop(name, None)
        for request in list(self.live.scheduler.requests.values()):
            name = request.request_id.rpartition("-")[0]
            if name in self.doomed and self.doomed[name] == _moment_of(request) and self.rng.random() < 0.5:
                self._abort(name, self.doomed.pop(name))

    def _abort(self, name: str, moment: str) -> None:
        self.counts[f"aborted {moment}"] += 1
        del self.prompts[name]
        self.live.engine.abort_request([name])

    def _check(self, got: dict[str, Any], want: dict[str, Any], name: str) -> None:
        """Tokens are equal, log-probabilities but for noise; equally likely tokens may differ."""
        assert got["finish_reason"] == "length", (name, got["finish_reason"])
        self.counts["finished"] += 1
        for at, (token, right) in enumerate(zip(got["tokens"], want["tokens"], strict=False)):
            ours, theirs = got["logprobs"][at], want["logprobs"][at]
            common = ours.keys() & theirs.keys()
            assert common, (name, at)
            assert all(math.isclose(ours[key], theirs[key], abs_tol=TOLERANCE) for key in common), (
                name,
                at,
                ours,
                theirs,
            )
            if token != right:
                assert theirs[str(right)] - theirs[str(token)] < TOLERANCE, (name, at, token, right, theirs)
                self.counts["ties"] += 1
                return

    def _rest(self) -> None:
        while self.prompts:
            self._step()
        self.live.rest()
        left = self.live.leftovers()
        assert not any(left.values()), left
        self.counts["rests"] += 1


def _moment_of(request: Any) -> str:
    """Returns the state of a request, of those in which it may be aborted."""
    from vllm.v1.request import RequestStatus

    if request.status == RequestStatus.RUNNING:
        return "decode" if request.num_output_tokens else "prefill"
    return "loading" if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS else "waiting"


def _held(live: LiveEngine) -> dict[str, int]:
    """What the server keeps on behalf of an engine at rest; each is to be 0.

    What is not pinned can be emptied.
    """
    client = live.side._server._client
    for _ in polls(SETTLE_SECONDS):
        status = client.status()
        held = {"leases": status.leases, "stores": status.stores, "quarantined_bytes": status.quarantined_bytes}
        if not any(held.values()):
            break
    held["not emptied"] = client.reset(wait=RESET_SECONDS)
    return {**held, "blocks": client.status().tiers[0].blocks}


def main() -> None:
    """Runs the job: its only step has duration, seed and expected answers."""
    job = json.loads(Path(sys.argv[1]).read_text())
    live, (step,) = LiveEngine(job["llm"]), job["steps"]
    churn = Churn(live, step["reference"], step["seed"])
    churn.run(step["seconds"])
    counters = live.counters()
    counts = {
        **churn.counts,
        "preemptions": counters["vllm:num_preemptions"],
        "external_hits": counters["vllm:external_prefix_cache_hits"],
        "failed_loads": live.failed_loads,
        "abandoned": live.abandoned,
        "not_stored": live.not_stored,
    }
    print("churn:", counts)
    Path(sys.argv[2]).write_text(json.dumps([{"name": "churn", "counts": counts, "held": _held(live)}]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
