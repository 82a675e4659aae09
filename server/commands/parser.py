"""Command-line parser of `kvtier`: declares the flags of every command.

This module imports only the standard library, so that `kvtier --help` starts fast.
"""

from __future__ import annotations

import argparse
from typing import Any

from ... import __version__
from .arguments import DAY_SECONDS, CommandParser, add_connection, add_endpoint, count, seconds
from .console import EXIT_CODES

__all__ = ["new_parser"]


_FLEET_CODES = "exit codes: 0 all servers answered; 1 a server did not answer; 2 wrong usage, or no server answered"


def new_parser() -> argparse.ArgumentParser:
    """Returns the parser; `options.command` is the name of the command."""
    parser = CommandParser(
        prog="kvtier",
        description="Tiered KV cache server for LLM inference engines.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvtier {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    _add_settings(commands.add_parser("serve", help="run the server until SIGTERM or Ctrl-C"))
    _add_config(commands)
    _add_shown(commands)
    _add_listed(commands)
    _add_conversations(commands)
    _add_evict(commands)
    _add_drain(commands)
    _add_keeper(commands)
    _add_fleet(commands)
    _add_doctor(commands)
    _add_fsck(commands)
    _add_remote(commands)
    _add_size(commands)
    _add_token(commands)
    completion = commands.add_parser("completion", help="print a shell's completion script")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    return parser


def _epilog() -> str:
    rows = "\n".join(f"  {code:<3} {commands:<19} {meaning}" for code, commands, meaning in EXIT_CODES)
    return (
        "Settings come from defaults, the file, the environment (KVTIER_REGION_SIZE, KVTIER_LOG_LEVEL, …) and flags.\n"
        "A later source overrides the earlier ones. `kvtier config` prints each setting with its origin."
        f"\n\nexit codes:\n{rows}\n"
    )


def _add_config(commands: Any) -> None:
    config = commands.add_parser("config", help="print the effective configuration with the origin of each value")
    config.add_argument("--json", action="store_true", help="print JSON instead of TOML")
    config.add_argument(
        "--reference", action="store_true", help="print the reference of all settings in Markdown instead"
    )
    _add_settings(config)


def _add_shown(commands: Any) -> None:
    """Adds the commands that show a server's status."""
    add_endpoint(commands.add_parser("status", help="show tiers, tenants and sessions of a running server"))
    top = commands.add_parser(
        "top",
        help="show live rates of tiers, tenants and sessions",
        description="Shows the rates per second in each interval, until `q` or Ctrl-C. On a terminal, the screen shows one view at "
        "a time, and each key is explained on the last line. Otherwise the command prints all tables once per interval, or with "
        "--json one line per interval. If NO_COLOR is set, the screen has no colours.",
    )
    _add_intervals(top)
    add_endpoint(top)
    add_endpoint(
        commands.add_parser(
            "tiers", help="show the tiers: fill, hits, queues, shares of tenants, placement of the memory"
        )
    )
    add_endpoint(commands.add_parser("sessions", help="list the connected engine processes"))


def _add_intervals(top: argparse.ArgumentParser) -> None:
    top.add_argument(
        "--interval", metavar="SECONDS", type=seconds(3600), default=2.0, help="length of an interval (default: 2)"
    )
    top.add_argument(
        "--count", metavar="N", type=count(0), default=0, help="number of intervals (default: 0, no limit)"
    )
    top.add_argument("--once", action="store_true", help="show one interval, like --count 1")


def _add_listed(commands: Any) -> None:
    for name, text in (
        ("leases", "list leases and running stores, with owner and remaining time"),
        ("handoffs", "list the requests that are held for another engine"),
    ):
        listed = commands.add_parser(name, help=text)
        listed.add_argument(
            "--most", metavar="N", type=count(0), default=0, help="list only the N oldest (default and maximum: 1,000)"
        )
        add_endpoint(listed)
    explain = commands.add_parser(
        "explain", help="show which blocks of a recent request were hits, and why the others were misses"
    )
    explain.add_argument("request", metavar="REQUEST", help="the engine's id of the request")
    explain.add_argument(
        "--engine", metavar="ID", default="", help="the engine (default: the last engine that used this id)"
    )
    add_endpoint(explain)


def _add_conversations(commands: Any) -> None:
    conversations = commands.add_parser(
        "conversations",
        help="list conversations; retain, prefetch, release, demote, pin or delete their blocks",
        description="Lists the conversations whose blocks the server has recorded, or acts on their blocks. `retain` keeps the "
        "blocks for the time of --for, and `release` ends this. `demote` makes the CPU tier evict them next if a lower tier has "
        "them. `prefetch` loads them into the CPU tier. `pin` keeps them until `unpin`. `delete` removes the blocks that no other "
        "conversation uses from all tiers of the server. `pin` and `unpin` need the role admin.",
    )
    actions = ("list", "show", "retain", "prefetch", "release", "demote", "pin", "unpin", "delete")
    conversations.add_argument("action", choices=actions, help="what to do")
    conversations.add_argument("conversation", metavar="CONVERSATION", nargs="?", help="name of the conversation")
    conversations.add_argument(
        "--prompt", metavar="KEY", help="instead of CONVERSATION: key of the last block of a prompt, in hexadecimal"
    )
    conversations.add_argument(
        "--block", metavar="KEY", action="append", default=[], help="instead of CONVERSATION: a block; may be repeated"
    )
    conversations.add_argument("--namespace", metavar="ID", help="the namespace of the keys of --block")
    conversations.add_argument("--tenant", metavar="NAME", help="tenant of the conversation (default: of the token)")
    conversations.add_argument(
        "--for", dest="duration", metavar="DURATION", help="duration for retain and prefetch, like 5m"
    )
    conversations.add_argument(
        "--most", metavar="N", type=count(0), default=0, help="list only N conversations (default and maximum: 100)"
    )
    conversations.add_argument("--page", metavar="N", type=count(0), default=0, help="list the page after this number")
    add_endpoint(conversations)


def _add_evict(commands: Any) -> None:
    evict = commands.add_parser(
        "evict",
        help="evict blocks by tier, tenant, namespace, age or number of bytes",
        description="Evicts the blocks that meet all given conditions, while the server serves other calls. At least one condition "
        "or --all is required. Keeps blocks that a lease or hold pins, and blocks that are being stored or loaded. Evicts "
        "retained blocks only with --retained. Prints how many blocks and bytes were evicted and kept. Ctrl-C stops the "
        "eviction, not the server.",
    )
    what = evict.add_argument_group("conditions")
    what.add_argument("--all", action="store_true", help="evict all blocks, without a condition")
    what.add_argument(
        "--tier", metavar="NAME", action="append", default=[], help="only blocks in this tier; may be repeated"
    )
    what.add_argument("--tenant", metavar="NAME", help='only blocks of this tenant; "" for blocks without a tenant')
    what.add_argument(
        "--namespace", metavar="ID", help="only blocks of the namespace with this id (see `kvtier sessions --json`)"
    )
    what.add_argument(
        "--older-than",
        metavar="DURATION",
        help="only blocks not used for this time, like 30m; after a restart every block counts as used at the restart",
    )
    what.add_argument(
        "--bytes",
        metavar="SIZE",
        help="evict at most this number of bytes in each tier, the least recently used blocks first",
    )
    what.add_argument("--retained", action="store_true", help="evict retained blocks too")
    evict.add_argument("--dry-run", action="store_true", help="only print how many blocks and bytes would be evicted")
    add_endpoint(evict)


def _add_drain(commands: Any) -> None:
    drain = commands.add_parser(
        "drain",
        help="make a server refuse new work, finish running work, and end",
        description="Drains the server. The server refuses new sessions, requests and stores. It finishes running work and writes "
        "blocks of the CPU tier to the tiers below, for at most 20 s. Then it ends, as after SIGTERM. With --stay the "
        "server does not end, and serves lookups until --undo.",
    )
    _add_drain_mode(drain)
    drain.add_argument("--wait", action="store_true", help="wait until the server is drained or has ended")
    add_endpoint(drain)


def _add_keeper(commands: Any) -> None:
    keeper = commands.add_parser(
        "keeper",
        help="hold the memory of the CPU tier while the server restarts",
        description="Runs a process that holds the memory of the CPU tier and connections of engines while the server restarts. "
        "The server's setting `keeper` is the path of its socket. Under systemd it is not needed. Ends with SIGTERM or Ctrl-C.",
    )
    keeper.add_argument("--socket", metavar="PATH", required=True, help="Unix socket on which the server connects")
    keeper.add_argument(
        "--forget-after",
        metavar="SECONDS",
        type=seconds(DAY_SECONDS),
        default=600.0,
        help="time without a server after which the memory is freed (default: 600)",
    )
    keeper.add_argument(
        "--max-descriptors",
        metavar="N",
        type=count(1),
        default=4096,
        help="maximum number of descriptors (default: 4096)",
    )


def _add_drain_mode(drain: argparse.ArgumentParser) -> None:
    how = drain.add_mutually_exclusive_group()
    how.add_argument("--stay", action="store_true", help="do not end the server; it refuses new work until --undo")
    how.add_argument("--undo", action="store_true", help="accept new work again, after --stay")


def _add_fleet(commands: Any) -> None:
    fleet = commands.add_parser("fleet", help="show or drain many servers")
    actions = fleet.add_subparsers(metavar="ACTION", required=True, dest="action")
    status = actions.add_parser(
        "status",
        help="show one row per server and their total",
        description="Asks all servers at the same time and prints one row per server and their total. Throughput is that of "
        "one interval; hit rates are those since the start. A server that does not answer is a row with the reason.",
        epilog=_FLEET_CODES,
    )
    status.add_argument(
        "--interval", metavar="SECONDS", type=seconds(3600), default=1.0, help="length of the interval (default: 1)"
    )
    top = actions.add_parser(
        "top",
        help="show live rates of many servers",
        description="Shows the rates of all servers per second in each interval, until `q` or Ctrl-C, with the keys of "
        "`kvtier top`. With --dns or --file the command reads the servers again every 10 s.",
        epilog=_FLEET_CODES,
    )
    _add_intervals(top)
    drain = actions.add_parser(
        "drain",
        help="drain many servers one after the other",
        description="Drains the servers in their order, as `kvtier drain --wait` does, and stops at the first failure. If a server "
        "does not answer before the first drain, the command drains none. --undo does not stop at a failure.",
        epilog="exit codes: 0 all servers are drained; 1 a server failed; 2 wrong usage, or no server answered",
    )
    _add_drain_mode(drain)
    drain.add_argument(
        "--parallel", metavar="N", type=count(1), default=1, help="drain up to N servers at the same time (default: 1)"
    )
    drain.add_argument(
        "--wait-engines",
        metavar="SECONDS",
        type=seconds(DAY_SECONDS),
        help="before a server ends, wait until no engine is connected to it; after this time, undo the drain and fail",
    )
    drain.add_argument(
        "--wait-restart",
        metavar="SECONDS",
        type=seconds(DAY_SECONDS),
        help="after a server has ended, wait until its supervisor has started a new one at the same address; fail after this time",
    )
    for action in (status, top, drain):
        which = action.add_mutually_exclusive_group(required=True)
        which.add_argument(
            "--servers", metavar="ADDRESS,…", help="addresses of the servers, like host-1:7450,host-2:7450"
        )
        which.add_argument(
            "--dns",
            metavar="NAME:PORT",
            help="all IPv4 and IPv6 addresses of a name, for example of a headless service; TLS verifies the name",
        )
        which.add_argument("--file", metavar="FILE", help="file with one address per line; # begins a comment")
        add_connection(action)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, the server, and the engines on this machine",
        description="Checks what a server and its clients need, with or without a running server. Prints for each check what was "
        "found, why it matters and what to do. Run this command in the same container and as the same user as the server (or "
        "engine), with the server's settings. The command changes no files. To measure a disk, it writes to an unnamed file for "
        "at most one second.",
        epilog="exit codes: 0 no check failed (warnings are possible); 1 a check failed; 2 wrong usage",
    )
    doctor.add_argument(
        "--hash-algo",
        metavar="NAME",
        help="hash algorithm that the engines will use: vLLM's --prefix-caching-hash-algo",
    )
    doctor.add_argument("--no-disk-test", action="store_true", help="do not measure disks")
    doctor.add_argument(
        "--only", metavar="CHECK", action="append", default=[], help="run only this check; may be repeated"
    )
    add_endpoint(doctor)
    _add_settings(doctor)


def _add_fsck(commands: Any) -> None:
    fsck = commands.add_parser(
        "fsck",
        help="check the blocks that the tiers keep on disk",
        description="Reads every block of the tiers and verifies the block's checksum. By default this command opens the tiers, so "
        "stop the server first. With --online a running server checks its tiers and continues to serve.",
        epilog="exit codes: 0 no damage; 1 unrepaired damage; 2 wrong usage, or no server answered; 3 all damage was repaired; "
        "4 a tier could not be checked; 78 the configuration is invalid",
    )
    fsck.add_argument(
        "--repair", action="store_true", help="quarantine damaged blocks, so that the server never reads them again"
    )
    fsck.add_argument(
        "--tier", metavar="NAME", action="append", default=[], help="check only this tier; may be repeated"
    )
    add_endpoint(fsck)
    offline = fsck.add_argument_group("while no server runs")
    offline.add_argument("--config", metavar="FILE", default=None, help="TOML file with settings (KVTIER_CONFIG)")
    offline.add_argument(
        "--data-dir", dest="data_dir", metavar="DIR", default=None, help="parent directory of the tiers' files"
    )
    online = fsck.add_argument_group("with a running server, at --endpoint")
    online.add_argument("--online", action="store_true", help="let the running server check its tiers")
    online.add_argument(
        "--rate",
        metavar="SIZE",
        help="maximum bytes read per second, like 100MiB, at least 64KiB (default: 0, no limit)",
    )


def _add_remote(commands: Any) -> None:
    remote = commands.add_parser(
        "remote",
        help="delete old objects of a tier of type s3",
        description="`kvtier remote gc` deletes the objects that are older than the tier's ttl from the bucket of a tier of type "
        "s3, and prints them. Servers may be running. Objects outside of the tier's prefix are never deleted. A lifecycle rule "
        "of the bucket does the same.",
        epilog="exit codes: 0 success; 1 the store refused a call or did not answer; 2 wrong usage; 78 the configuration is "
        "invalid",
    )
    remote.add_argument("action", choices=["gc"], help="what to do")
    remote.add_argument("--config", metavar="FILE", default=None, help="TOML file with settings (KVTIER_CONFIG)")
    remote.add_argument("--tier", metavar="NAME", default=None, help="the tier (default: the only tier of type s3)")
    remote.add_argument(
        "--older-than",
        metavar="DURATION",
        help="only objects stored before this time, like 3d (default: the tier's ttl, 7d)",
    )
    remote.add_argument(
        "--old-formats",
        action="store_true",
        help="delete all objects in formats that only older versions of kvtier read",
    )
    remote.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    remote.add_argument("--json", action="store_true", help="print JSON")


def _add_size(commands: Any) -> None:
    size = commands.add_parser(
        "size", help="compute the KV bytes per token of a model, and how many tokens tiers of given sizes hold"
    )
    size.add_argument("model_config", metavar="CONFIG.json", help="the model's config.json, as on Hugging Face")
    dtypes = ("auto", "bfloat16", "float16", "float32", "fp8")
    size.add_argument(
        "--dtype", choices=dtypes, default="auto", help="element type of the KV cache (auto: the model's)"
    )
    size.add_argument("--block-tokens", metavar="N", type=count(1), default=16, help="tokens per block (default: 16)")
    size.add_argument(
        "--tp", metavar="N", type=count(1), default=1, help="tensor parallel ranks of the engine (default: 1)"
    )
    size.add_argument("--cpu", metavar="SIZE", help="size of the region, like 64GiB")
    size.add_argument(
        "--disk", metavar="SIZE", help="size of an lmdb tier, like 500GiB (a disk tier of this size holds a sixth more)"
    )
    size.add_argument("--json", action="store_true", help="print JSON instead of lines")


def _add_token(commands: Any) -> None:
    token = commands.add_parser("token", help="create access tokens for clients")
    actions = token.add_subparsers(metavar="ACTION", required=True)
    new = actions.add_parser("new", help="create a token; print the token and its entry for the token file")
    new.add_argument("--tenant", metavar="NAME", help='tenant of the token; "*" for any tenant')
    roles = ("engine", "reader", "admin", "metrics")
    new.add_argument("--role", choices=roles, action="append", required=True, help="role of the token; may be repeated")
    new.add_argument("--name", metavar="NAME", help="name of the caller in the log")
    new.add_argument(
        "--shared-memory",
        action="store_true",
        help="permit the caller to map the memory of its tenant, or with --tenant '*' of every tenant",
    )
    new.add_argument(
        "--file", metavar="FILE", help="append the entry to this token file (auth.tokens) instead of printing it"
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for settings. The value of each flag is stored under the setting's key."""

    def add(flag: str, key: str, text: str, **more: Any) -> None:
        parser.add_argument(flag, dest=key, default=None, help=text, **more)

    add("--config", "config", "TOML file with settings (KVTIER_CONFIG)", metavar="FILE")
    add("--listen", "listen", "unix:PATH or HOST:PORT; may be repeated", metavar="ADDRESS", action="append")
    add("--region-size", "region_size", "size of the region (CPU tier), like 8GiB", metavar="SIZE")
    add("--data-dir", "data_dir", "parent directory of the tiers' files", metavar="DIR")
    add("--cpu-only", "tiers", "run without tiers below the CPU tier", action="store_const", const=())
    add("--metrics", "metrics", 'address of the HTTP endpoint for Prometheus, or "off"', metavar="HOST:PORT")
    add("--log-level", "log.level", "debug, info, warning or error", metavar="LEVEL")
    add("--log-format", "log.format", "auto, console or json", metavar="FORMAT")
    add(
        "--insecure",
        "insecure",
        "allow TCP (loopback included) without TLS or without authentication",
        action="store_const",
        const=True,
    )
