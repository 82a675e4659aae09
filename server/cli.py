"""The command `kvtier`.

Exit codes: 0 done; 1 failed; 2 wrong usage, or no server answers; 78 the configuration cannot be used (EX_CONFIG).

Everything heavy is imported by the command that needs it, so that `kvtier --help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import __version__
from .console import EXIT_CONFIG, EXIT_FAILURE, EXIT_UNREACHABLE, EXIT_USAGE
from .console import complain as _complain
from .console import refuse as _refuse
from .console import say as _say

if TYPE_CHECKING:
    from ..protos.endpoint import Endpoint
    from .sources import Loaded

__all__ = ["EXIT_CONFIG", "EXIT_FAILURE", "EXIT_UNREACHABLE", "EXIT_USAGE", "main"]

_EPILOG = """\
Settings come from built-in defaults, then the file, then the environment (KVTIER_REGION_SIZE, KVTIER_LOG_LEVEL, …),
then flags; the later wins. `kvtier config` shows all of them, and where each comes from.

exit codes: 0 done; 1 failed; 2 wrong usage, or no server answers; 78 the configuration cannot be used
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `kvtier` with these arguments, or the process's; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `kvtier config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier",
        description="A tiered home for the KV cache of LLM inference engines.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvtier {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="run the server, until SIGTERM or Ctrl-C")
    serve.set_defaults(run=_serve)
    _add_settings(serve)

    config = commands.add_parser("config", help="print the effective configuration and where it comes from")
    config.set_defaults(run=_config)
    config.add_argument("--json", action="store_true", help="print JSON instead of TOML")
    config.add_argument("--reference", action="store_true", help="explain all settings instead, in Markdown")
    _add_settings(config)

    status = commands.add_parser("status", help="show what a running server holds, and for whom")
    status.set_defaults(run=_status)
    _add_endpoint(status)

    leases = commands.add_parser("leases", help="list who pins blocks, for whom and for how long")
    leases.set_defaults(run=_leases)
    leases.add_argument("--most", metavar="N", type=int, default=0, help="list at most so many, the oldest (1,000)")
    _add_endpoint(leases)

    handoffs = commands.add_parser("handoffs", help="list the requests that engines have held for each other")
    handoffs.set_defaults(run=_handoffs)
    handoffs.add_argument("--most", metavar="N", type=int, default=0, help="list at most so many, the oldest (1,000)")
    _add_endpoint(handoffs)

    explain = commands.add_parser("explain", help="say why blocks of a request of the last minutes were misses")
    explain.set_defaults(run=_explain)
    explain.add_argument("request", metavar="REQUEST", help="the engine's id of the request")
    explain.add_argument("--engine", metavar="ID", default="", help="the engine; else whichever used that id last")
    _add_endpoint(explain)

    _add_fsck(commands)
    _add_bench(commands)
    return parser


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure from how many tokens on a transfer of KV is worth it",
        description="Measures, against a running server, how long it takes to have a prefix handed over, and how long an "
        "engine takes to compute one; proposes kv_recompute_threshold. What it puts on the server goes when it has ended.",
    )
    bench.set_defaults(run=_bench)
    bench.add_argument("--break-even", action="store_true", help="what to measure; there is nothing else so far")
    _add_endpoint(bench)
    bench.add_argument(
        "--transport", choices=("auto", "shm", "grpc"), default="auto", help="how bytes move (auto: shm on one host)"
    )
    bench.add_argument("--max-tokens", metavar="N", type=int, default=4096, help="longest prefix and prompt (4096)")
    bench.add_argument("--rounds", metavar="N", type=int, default=7, help="how often each length is measured (7)")
    bench.add_argument(
        "--max-bytes",
        metavar="SIZE",
        default="256MiB",
        help="most that is put on the server, and an eighth of its CPU tier at most (256MiB)",
    )
    size = bench.add_argument_group("how large KV is; else as of the engine that is connected")
    size.add_argument("--kv-bytes-per-token", metavar="SIZE", help="of one rank, all layers, like 128KiB")
    size.add_argument("--block-tokens", metavar="N", type=int, help="tokens of a block (16)")
    size.add_argument("--model", metavar="NAME", help="which engine's, where several are connected")
    speed = bench.add_argument_group("how fast prompts are computed, one of")
    speed.add_argument("--engine", metavar="URL", help="an engine to ask: its OpenAI API, like http://127.0.0.1:8000")
    speed.add_argument("--prefill-tokens-per-s", metavar="N", type=float, help="where it is known")


def _add_fsck(commands: Any) -> None:
    fsck = commands.add_parser(
        "fsck",
        help="check the blocks that the tiers keep on disk",
        description="Reads every block of the tiers and verifies its checksum: of the configured tiers, while no server runs; "
        "or with --online of a running server's, which goes on serving.",
        epilog="exit codes: 0 all sound; 1 damage that is still there; 2 wrong usage, or no server answers; 3 there was "
        "damage, all repaired; 4 a tier could not be checked; 78 the configuration cannot be used",
    )
    fsck.set_defaults(run=_fsck)
    fsck.add_argument(
        "--repair", action="store_true", help="quarantine what is damaged, so that it is never read again"
    )
    fsck.add_argument("--tier", metavar="NAME", action="append", default=[], help="only this tier; may be repeated")
    _add_endpoint(fsck)
    offline = fsck.add_argument_group("while no server runs")
    offline.add_argument("--config", metavar="FILE", default=None, help="TOML file with settings (KVTIER_CONFIG)")
    offline.add_argument(
        "--data-dir", dest="data_dir", metavar="DIR", default=None, help="directory of the tiers on disk"
    )
    online = fsck.add_argument_group("with a running server, at --endpoint")
    online.add_argument("--online", action="store_true", help="let the running server check its tiers")
    online.add_argument("--rate", metavar="SIZE", help="read at most so much in a second, like 100MiB")


def _add_endpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoint",
        metavar="ADDRESS",
        help="unix:PATH or HOST:PORT; else KVTIER_ENDPOINT, else this user's socket",
    )
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=5.0, help="how long to wait (5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for settings; what a flag is stored under is the setting's key."""

    def add(flag: str, key: str, text: str, **more: Any) -> None:
        parser.add_argument(flag, dest=key, default=None, help=text, **more)

    add("--config", "config", "TOML file with settings (KVTIER_CONFIG)", metavar="FILE")
    add("--listen", "listen", "unix:PATH or HOST:PORT; may be repeated", metavar="ADDRESS", action="append")
    add("--region-size", "region_size", "size of the CPU tier, like 8GiB", metavar="SIZE")
    add("--data-dir", "data_dir", "directory of the tiers on disk", metavar="DIR")
    add("--cpu-only", "tiers", "no tiers below the CPU tier", action="store_const", const=())
    add("--metrics", "metrics", 'where Prometheus scrapes, or "off"', metavar="HOST:PORT")
    add("--log-level", "log.level", "debug, info, warning or error", metavar="LEVEL")
    add("--log-format", "log.format", "auto, console or json", metavar="FORMAT")
    add("--insecure", "insecure", "allow TCP that other hosts can reach", action="store_const", const=True)


def _load(options: argparse.Namespace) -> Loaded:
    from .settings import SETTINGS
    from .sources import load

    flags = {key: value for key, value in vars(options).items() if key in SETTINGS}
    return load(flags, file=options.config)


def _serve(options: argparse.Namespace) -> int:
    from . import logs
    from .config import ConfigError

    try:
        loaded = _load(options)
    except ConfigError as error:
        return _refuse(error.problems, EXIT_CONFIG)
    logs.configure(loaded.config.log)
    for warning in loaded.warnings:
        logs.get_logger(__name__).warning(warning)
    from .app import EXIT_LEFT_BEHIND, serve

    try:
        code = serve(loaded.config)
    finally:
        logs.flush()
    if code == EXIT_LEFT_BEHIND:
        os._exit(code)  # an orderly end would unmap what a thread may be writing to
    return code


def _config(options: argparse.Namespace) -> int:
    from . import render
    from .config import ConfigError

    if options.reference:
        _say(render.reference().rstrip())
        return 0
    try:
        loaded = _load(options)
    except ConfigError as error:
        return _refuse(error.problems, EXIT_CONFIG)
    _say(render.to_json(loaded) if options.json else render.to_toml(loaded).rstrip())
    _complain(f"warning: {warning}" for warning in loaded.warnings)
    return 0


def _status(options: argparse.Namespace) -> int:
    from . import status

    def show(answer: Any, endpoint: Endpoint) -> None:
        _say(status.to_json(answer)) if options.json else status.show(answer, endpoint)

    return _inquire(options, status.fetch, show)


def _leases(options: argparse.Namespace) -> int:
    from ..protos.v1.admin_pb2 import ListLeasesRequest
    from . import inquiry, leases

    if not 0 <= options.most < 1 << 32:
        return _refuse([f"--most {options.most}: must be 0 or more"], EXIT_USAGE)

    def fetch(endpoint: Endpoint, timeout: float) -> Any:
        return inquiry.ask(endpoint, "ListLeases", ListLeasesRequest(max_leases=options.most), timeout)

    def show(answer: Any, _: Endpoint) -> None:
        _say(leases.to_json(answer)) if options.json else leases.show(answer)

    return _inquire(options, fetch, show)


def _handoffs(options: argparse.Namespace) -> int:
    from ..protos.v1.admin_pb2 import ListHandoffsRequest
    from . import handoffs, inquiry

    if not 0 <= options.most < 1 << 32:
        return _refuse([f"--most {options.most}: must be 0 or more"], EXIT_USAGE)

    def fetch(endpoint: Endpoint, timeout: float) -> Any:
        return inquiry.ask(endpoint, "ListHandoffs", ListHandoffsRequest(max_handoffs=options.most), timeout)

    def show(answer: Any, _: Endpoint) -> None:
        _say(handoffs.to_json(answer)) if options.json else handoffs.show(answer)

    return _inquire(options, fetch, show)


def _explain(options: argparse.Namespace) -> int:
    from ..protos.v1.admin_pb2 import ExplainRequestRequest
    from . import explain, inquiry

    def fetch(endpoint: Endpoint, timeout: float) -> Any:
        request = ExplainRequestRequest(request_id=options.request, engine_id=options.engine)
        return inquiry.ask(endpoint, "ExplainRequest", request, timeout)

    def show(answer: Any, _: Endpoint) -> None:
        request_id: str = options.request
        _say(explain.to_json(answer, request_id)) if options.json else explain.show(answer, request_id)

    return _inquire(options, fetch, show)


def _bench(options: argparse.Namespace) -> int:
    from . import bench_command

    return bench_command.run(options)


def _inquire(
    options: argparse.Namespace, fetch: Callable[[Endpoint, float], Any], show: Callable[[Any, Endpoint], None]
) -> int:
    """Asks the server that the options name, and shows what it answers."""
    from ..protos.endpoint import EndpointError, client_endpoint
    from . import inquiry

    try:
        endpoint = client_endpoint(options.endpoint)
    except EndpointError as error:
        return _refuse([f"{error}"], EXIT_USAGE)
    try:
        answer = fetch(endpoint, options.timeout)
    except inquiry.UnreachableError as error:
        return _refuse([f"{error}"], EXIT_UNREACHABLE)
    except inquiry.InquiryError as error:
        return _refuse([f"{error}"], EXIT_FAILURE)
    show(answer, endpoint)
    return 0


def _fsck(options: argparse.Namespace) -> int:
    offline_only = ("config", "data_dir")
    online_only = ("endpoint", "rate")
    for name in offline_only if options.online else online_only:
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            return _refuse([f"{flag} does not go with{'' if options.online else 'out'} --online"], EXIT_USAGE)
    from . import fsck_command
    from .config import ConfigError

    if options.online:
        return fsck_command.online(options)
    try:
        loaded = _load(options)
    except ConfigError as error:
        return _refuse(error.problems, EXIT_CONFIG)
    _complain(f"warning: {warning}" for warning in loaded.warnings)
    return fsck_command.offline(loaded.config.tiers, options)
