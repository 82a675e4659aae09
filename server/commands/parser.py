"""All commands and their flags. Loads nothing but the standard library: `kvtier --help` is this and no more."""

from __future__ import annotations

import argparse
from typing import Any

from ... import __version__
from .console import EXIT_CODES

__all__ = ["add_endpoint", "new_parser"]


def new_parser() -> argparse.ArgumentParser:
    """Returns the parser of `kvtier`; `options.command` is the module of this package that runs the command."""
    parser = argparse.ArgumentParser(
        prog="kvtier",
        description="A tiered home for the KV cache of LLM inference engines.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvtier {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    _add_settings(commands.add_parser("serve", help="run the server, until SIGTERM or Ctrl-C"))
    _add_config(commands)
    _add_shown(commands)
    _add_listed(commands)
    _add_evict(commands)
    _add_drain(commands)
    _add_doctor(commands)
    _add_fsck(commands)
    _add_size(commands)
    _add_token(commands)
    completion = commands.add_parser("completion", help="print what makes a shell complete commands and flags")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="which shell")
    return parser


def _epilog() -> str:
    rows = "\n".join(f"  {code:<3} {commands:<19} {meaning}" for code, commands, meaning in EXIT_CODES)
    return (
        "Settings come from built-in defaults, then the file, then the environment (KVTIER_REGION_SIZE, "
        "KVTIER_LOG_LEVEL, …),\nthen flags; the later wins. `kvtier config` shows all of them, and where each comes from."
        f"\n\nexit codes:\n{rows}\n"
    )


def _add_config(commands: Any) -> None:
    config = commands.add_parser("config", help="print the effective configuration and where it comes from")
    config.add_argument("--json", action="store_true", help="print JSON instead of TOML")
    config.add_argument("--reference", action="store_true", help="explain all settings instead, in Markdown")
    _add_settings(config)


def _add_shown(commands: Any) -> None:
    """Adds the commands that show what GetStatus says."""
    add_endpoint(commands.add_parser("status", help="show what a running server holds, and for whom"))
    top = commands.add_parser(
        "top",
        help="watch what a server does: rates per second of tiers, tenants and sessions",
        description="Shows rates between two looks at the server, again and again on a terminal, until Ctrl-C. "
        "With --json a line of JSON for each.",
    )
    top.add_argument("--interval", metavar="SECONDS", type=float, default=2.0, help="between two looks (2)")
    top.add_argument("--count", metavar="N", type=int, default=0, help="end after so many (0: never)")
    top.add_argument("--once", action="store_true", help="show one interval and end: the same as --count 1")
    add_endpoint(top)
    add_endpoint(commands.add_parser("tiers", help="show the tiers: fill, hits, queues, tenants, where memory is"))
    add_endpoint(commands.add_parser("sessions", help="list the engine processes that are connected"))


def _add_listed(commands: Any) -> None:
    """Adds the commands that list or explain one kind of thing."""
    for name, text in (
        ("leases", "list who pins blocks, for whom and for how long"),
        ("handoffs", "list the requests that engines have held for each other"),
    ):
        listed = commands.add_parser(name, help=text)
        listed.add_argument("--most", metavar="N", type=int, default=0, help="list at most so many, the oldest (1,000)")
        add_endpoint(listed)
    explain = commands.add_parser("explain", help="say why blocks of a request of the last minutes were misses")
    explain.add_argument("request", metavar="REQUEST", help="the engine's id of the request")
    explain.add_argument("--engine", metavar="ID", default="", help="the engine; else whichever used that id last")
    add_endpoint(explain)


def _add_evict(commands: Any) -> None:
    evict = commands.add_parser(
        "evict",
        help="evict blocks now: of a tenant, a namespace, a tier, or unused for long",
        description="Evicts, from a server that goes on serving, what meets all conditions; at least one is to be given, "
        "or --all. What is pinned by a lease, being stored or being loaded stays, and what requests have had retained "
        "stays without --retained. Says how much went, and how much stayed. Ctrl-C leaves it at what has gone.",
    )
    what = evict.add_argument_group("what is to go")
    what.add_argument("--all", action="store_true", help="all blocks, where nothing else is said")
    what.add_argument(
        "--tier", metavar="NAME", action="append", default=[], help="only from this tier; may be repeated"
    )
    what.add_argument("--tenant", metavar="NAME", help='only blocks of this tenant; "" for those without one')
    what.add_argument(
        "--namespace", metavar="ID", help="only of the namespace with this id, as in `kvtier sessions --json`"
    )
    what.add_argument(
        "--older-than", metavar="DURATION", help="only what was not used for so long, like 30m; restarts begin anew"
    )
    what.add_argument(
        "--bytes", metavar="SIZE", help="as few as make up so much in each tier, the least recently used first"
    )
    what.add_argument("--retained", action="store_true", help="also what requests have had retained")
    evict.add_argument("--dry-run", action="store_true", help="say how much would go, and change nothing")
    add_endpoint(evict)


def _add_drain(commands: Any) -> None:
    drain = commands.add_parser(
        "drain",
        help="end a server in order, or have it take no new work",
        description="Has a server take no new sessions, requests and stores, finish what is under way, make durable what "
        "fits, and end, as SIGTERM does. With --stay it does not end, and serves lookups meanwhile, until --undo.",
    )
    how = drain.add_mutually_exclusive_group()
    how.add_argument("--stay", action="store_true", help="do not end: take no new work until --undo")
    how.add_argument("--undo", action="store_true", help="take new work again, after --stay")
    drain.add_argument("--wait", action="store_true", help="wait until it is drained, or has ended")
    add_endpoint(drain)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="look for what is wrong with this machine, the server, and the engines beside it",
        description="Checks what a server and its clients need here, with a running server and without, and says of each "
        "what was seen, why it matters and what to do. Run it as the user, and in the container, that the server or the "
        "engine runs in, with the settings of the server. Changes nothing; for the speed of disks it writes an unnamed file for "
        "a second at most.",
        epilog="exit codes: 0 nothing fails, though there may be warnings; 1 something fails; 2 wrong usage",
    )
    doctor.add_argument(
        "--hash-algo", metavar="NAME", help="what engines are to be started with: vLLM's --prefix-caching-hash-algo"
    )
    doctor.add_argument("--no-disk-test", action="store_true", help="do not measure disks")
    doctor.add_argument("--only", metavar="CHECK", action="append", default=[], help="only this check; may be repeated")
    add_endpoint(doctor)
    _add_settings(doctor)


def _add_fsck(commands: Any) -> None:
    fsck = commands.add_parser(
        "fsck",
        help="check the blocks that the tiers keep on disk",
        description="Reads every block of the tiers and verifies its checksum: of the configured tiers, while no server runs; "
        "or with --online of a running server's, which goes on serving.",
        epilog="exit codes: 0 all sound; 1 damage that is still there; 2 wrong usage, or no server answers; 3 there was "
        "damage, all repaired; 4 a tier could not be checked; 78 the configuration cannot be used",
    )
    fsck.add_argument(
        "--repair", action="store_true", help="quarantine what is damaged, so that it is never read again"
    )
    fsck.add_argument("--tier", metavar="NAME", action="append", default=[], help="only this tier; may be repeated")
    add_endpoint(fsck)
    offline = fsck.add_argument_group("while no server runs")
    offline.add_argument("--config", metavar="FILE", default=None, help="TOML file with settings (KVTIER_CONFIG)")
    offline.add_argument(
        "--data-dir", dest="data_dir", metavar="DIR", default=None, help="directory of the tiers on disk"
    )
    online = fsck.add_argument_group("with a running server, at --endpoint")
    online.add_argument("--online", action="store_true", help="let the running server check its tiers")
    online.add_argument(
        "--rate", metavar="SIZE", help="read at most so much in a second, like 100MiB; 64KiB at least (0: no bound)"
    )


def _add_size(commands: Any) -> None:
    size = commands.add_parser(
        "size", help="compute the KV bytes per token of a model, and what tiers of given sizes hold"
    )
    size.add_argument("model_config", metavar="CONFIG.json", help="the model's config.json, as on Hugging Face")
    dtypes = ("auto", "bfloat16", "float16", "float32", "fp8")
    size.add_argument("--dtype", choices=dtypes, default="auto", help="of the KV cache (auto: the model's)")
    size.add_argument("--block-tokens", metavar="N", type=int, default=16, help="tokens of a block (16)")
    size.add_argument("--tp", metavar="N", type=int, default=1, help="tensor parallel ranks of the engine (1)")
    size.add_argument("--cpu", metavar="SIZE", help="size of the region, like 64GiB")
    size.add_argument("--disk", metavar="SIZE", help="size of an lmdb tier, like 500GiB")
    size.add_argument("--json", action="store_true", help="print JSON instead of lines")


def _add_token(commands: Any) -> None:
    token = commands.add_parser("token", help="make the tokens that clients show the server")
    actions = token.add_subparsers(metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make one, print it once, and what the file of tokens says of it")
    new.add_argument("--tenant", metavar="NAME", help='whose it is; "*" for any')
    roles = ("engine", "reader", "admin", "metrics")
    new.add_argument("--role", choices=roles, action="append", required=True, help="what for; may be repeated")
    new.add_argument("--name", metavar="NAME", help="how the log calls its holder")
    new.add_argument("--shared-memory", action="store_true", help="its holder may map the memory of all tenants")
    new.add_argument("--file", metavar="FILE", help="append it to this file of tokens (auth.tokens)")


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    """Adds how a running server is reached: the same for every command that asks one."""
    parser.add_argument(
        "--endpoint",
        metavar="ADDRESS",
        help="unix:PATH or HOST:PORT; else KVTIER_ENDPOINT, else this user's socket",
    )
    parser.add_argument("--ca", metavar="FILE", help='who vouches for the server, for TLS; or "system" (KVTIER_CA)')
    parser.add_argument("--cert", metavar="FILE", help="certificate to show to the server (KVTIER_CERT)")
    parser.add_argument("--key", metavar="FILE", help="its private key (KVTIER_KEY)")
    parser.add_argument("--token-file", metavar="FILE", help="file with a token (KVTIER_TOKEN_FILE)")
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
    add("--insecure", "insecure", "allow TCP in the clear, loopback included", action="store_const", const=True)
