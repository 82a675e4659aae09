"""Checks of the configuration, the socket, the server, its ports and its tiers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ... import __version__
from ...protos.durations import seconds_of
from ...protos.endpoint import default_endpoint, parse_endpoint
from ...tiers.secondary_tier import TierError
from ..config.peers import PEERS_TIER
from ..config.schema import TierConfig
from ..config.units import human_age, human_size
from ..rpc.listening_sockets import port_error
from ..rpc.sessions import PROTOCOL_VERSIONS
from ..tier_host.factory import tier_class
from ..tier_host.guard import describe_error
from .finding import CheckContext, CheckResult, fail, ok, warn

__all__ = ["configuration", "ports", "server", "socket_file", "tiers", "versions"]

_START = "start one: kvtier serve"
_REMEDIES = {
    "UNAUTHENTICATED": "give valid credentials: --token-file (KVTIER_TOKEN_FILE), or --cert and --key; docs/security.md",
    "TIMEOUT": "check whether the server hangs (log, CPU time) or a firewall drops packets; "
    "docs/troubleshooting.md#kvtier-server-not-answering",
    "TLS": "--ca (KVTIER_CA) must match the server's certificate, and the server must accept --cert and --key; "
    "docs/security.md",
}


def configuration(context: CheckContext) -> Iterator[CheckResult]:
    """Checks that a server can start with this configuration."""
    for problem in context.problems:
        yield fail(
            problem,
            "kvtier serve ends with exit code 78",
            "correct the setting; kvtier config shows the origin of each value",
        )
    for warning in context.warnings:
        yield warn(warning, "this is permitted, but perhaps a mistake", "kvtier config shows the origin of each value")
    if difference := _difference(context):
        yield warn(
            f"these settings are not those of the running server: {difference}",
            "the checks of memory and disks describe these settings, not the server",
            "run kvtier doctor with the server's --config, environment and flags",
        )
    elif context.config is not None and not context.warnings:
        yield ok(
            f"valid: CPU tier of {human_size(context.config.region_size)}, tiers below it: {len(context.config.tiers)}"
        )


def _difference(context: CheckContext) -> str:
    """Returns how the settings differ from the running server's; empty if they agree."""
    config, status = context.config, context.status
    if config is None or status is None:
        return ""
    named = [tier.name for tier in config.tiers] + [PEERS_TIER] * bool(config.peers.servers)
    pairs = {
        "region_size": (human_size(config.region_size), human_size(status.region.size_bytes)),
        "tiers": tuple(", ".join(names) or "none" for names in (named, [tier.name for tier in status.tiers[1:]])),
    }
    return "; ".join(f"{name} is {here} here, {there} there" for name, (here, there) in pairs.items() if here != there)


def socket_file(context: CheckContext) -> Iterator[CheckResult]:
    """Checks the socket file and its permissions, and that a server listens on the socket."""
    if context.endpoint.path is None:
        yield ok(f"{context.endpoint} is TCP and has no socket file")
        return
    path = Path(context.endpoint.path)
    try:
        status = path.lstat()
    except PermissionError:
        yield fail(
            f"user {os.getuid()} cannot enter {path.parent}",
            "this user cannot connect to the server's sockets",
            "run this command as the server's user, or choose a directory that both users can enter",
        )
        return
    except (FileNotFoundError, NotADirectoryError):
        yield from _absent(path)
        return
    if not stat.S_ISSOCK(status.st_mode):
        yield fail(
            f"{path} is not a socket", "a server cannot start with this path", "move the file, or choose another path"
        )
        return
    yield from _ownership(path, status)
    if (trouble := _connect(path)) is not None:
        yield _not_listening(path, trouble)


def _absent(path: Path) -> Iterator[CheckResult]:
    directory = next(parent for parent in path.parents if parent.exists())
    if not os.access(directory, os.W_OK | os.X_OK):
        yield fail(
            f"{path} does not exist, and user {os.getuid()} cannot write to {directory}",
            "a server cannot create its socket",
            "choose another path (--listen unix:PATH), or change the directory's owner",
        )
    else:
        yield warn(f"{path} does not exist: no server runs here", "engines recompute everything", _START)


def _ownership(path: Path, status: os.stat_result) -> Iterator[CheckResult]:
    own, mode = os.getuid(), stat.S_IMODE(status.st_mode)
    if status.st_uid != own and path == Path(default_endpoint().path or ""):
        yield fail(
            f"{path} belongs to user {status.st_uid}, not to {own}",
            "that user could receive the calls of engines and answer instead of the server",
            "find out who created the socket, remove it, and restart the server",
        )
    elif not os.access(path, os.R_OK | os.W_OK):
        yield fail(
            f"{path} belongs to user {status.st_uid}, mode {mode:04o}: user {own} cannot connect",
            "all calls fail, so every lookup is a miss",
            "run engines and this command as the server's user, or use another directory",
        )
    elif mode & 0o077:
        yield warn(
            f"{path} has mode {mode:04o}",
            "other users can connect, and read and write the cache",
            f"chmod 600 {path}; the server does this when it starts",
        )
    else:
        whose = "this user's" if status.st_uid == own else f"user {status.st_uid}'s"
        yield ok(f"{path} is {whose}, mode {mode:04o}")


def _connect(path: Path) -> OSError | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            return error
    return None


def _not_listening(path: Path, trouble: OSError) -> CheckResult:
    if trouble.errno != errno.ECONNREFUSED:
        return fail(
            f"{path}: {trouble.strerror or trouble}",
            "calls fail",
            "check the permissions of the socket, and the server",
        )
    if _is_locked(path.with_name(f"{path.name}.lock")):
        return fail(
            f"{path}: no server listens, but the lock of the socket is held",
            "a server is starting or ending, or hangs",
            "check the server's log; the server should accept calls or end within a minute",
        )
    return fail(
        f"{path} is stale: its server was killed",
        "engines recompute everything until a server runs again",
        f"{_START}; the new server replaces the socket",
    )


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def server(context: CheckContext) -> Iterator[CheckResult]:
    """Checks that a server answers and is healthy."""
    status = context.status
    if status is None and context.reason == "PERMISSION_DENIED":
        yield ok(f"answers at {context.endpoint}: version {context.server_version}; the status requires an admin token")
        return
    if status is None and context.reason:
        why = "an engine with the same settings gets only misses"
        yield fail(context.error, why, _REMEDIES.get(context.reason, "see docs/troubleshooting.md, errors by reason"))
        return
    if status is None:
        path = context.endpoint.path
        there = path is None or _connect(Path(path)) is None
        judge = fail if there else warn
        yield judge(context.error, "without a server engines recompute everything", _START)
        return
    state = (
        f"version {status.server_version}, up {human_age(seconds_of(status.uptime))}, {len(status.sessions)} sessions"
    )
    yield ok(f"answers at {context.endpoint}: {state}")
    if status.draining:
        yield warn(
            "the server refuses new work",
            "new blocks are not stored",
            "kvtier drain --undo, unless the server is about to end",
        )
    for tier in status.tiers:
        if not tier.healthy:
            yield warn(
                f"tier {tier.name}: {tier.trouble}",
                "the server works without this tier",
                "docs/troubleshooting.md#a-tier-is-in-trouble",
            )
    for each in status.downgrades:
        yield warn(
            f"{each.feature}: {each.cause}",
            "a path of the server is slower, or a feature is absent",
            each.remedy or "docs/running.md#downgrades",
        )
    if status.quarantined_bytes:
        yield warn(
            f"{human_size(status.quarantined_bytes)} is in quarantine",
            "this memory is not reused, because processes whose stores have ended may still write to it",
            "end or resume processes that map the region without a session: grep -ls memfd:kvtier /proc/[0-9]*/maps",
        )


def versions(context: CheckContext) -> Iterator[CheckResult]:
    """Checks that this installation and the server have a protocol version in common."""
    if not context.protocol_versions:
        yield ok(
            f"kvtier {__version__} here supports protocol {_numbers(PROTOCOL_VERSIONS)}; there is no server to compare with"
        )
    elif not set(context.protocol_versions) & set(PROTOCOL_VERSIONS):
        yield fail(
            f"the server ({context.server_version}) supports protocol {_numbers(context.protocol_versions)}, "
            f"kvtier {__version__} here supports {_numbers(PROTOCOL_VERSIONS)}",
            "every session is refused",
            "install the same version of kvtier for the server and for the engines",
        )
    elif context.server_version != __version__:
        yield warn(
            f"the server is {context.server_version}, kvtier here is {__version__}; both support protocol "
            f"{_numbers(context.protocol_versions)}",
            "the client and the server work together, but use only features that both versions have",
            "install the same version on both sides",
        )
    else:
        yield ok(f"both sides are {__version__}, protocol {_numbers(context.protocol_versions)}")


def _numbers(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions))


def ports(context: CheckContext) -> Iterator[CheckResult]:
    """Checks that the configured TCP ports are free, or used by the running server."""
    config = context.config
    if config is None:
        return
    addresses = [endpoint for endpoint in config.endpoints if not endpoint.is_unix]
    if config.bulk.tcp and config.bulk.tcp_port:
        addresses += [replace(endpoint, port=config.bulk.tcp_port) for endpoint in addresses]
    addresses += [parse_endpoint(config.metrics)] if config.metrics else []
    addresses += [
        parse_endpoint(address.removeprefix("tcp://"))
        for address in (config.events.publish, config.events.replay)
        if address is not None and address.startswith("tcp://")
    ]
    if not addresses:
        yield ok("no TCP port is configured")
    for address in addresses:
        trouble = port_error(address) if address.port else None
        if trouble is None:
            yield ok(f"{address} is free")
        elif context.status is not None and trouble.errno == errno.EADDRINUSE:
            yield ok(f"{address} is in use, probably by the running server")
        else:
            yield fail(
                f"{address}: {trouble.strerror}",
                "a server cannot start",
                "choose another port (listen, metrics, bulk.tcp_port, events), or end the process that uses it: ss -ltnp",
            )


def tiers(context: CheckContext) -> Iterator[CheckResult]:
    """Checks that the packages of tiers can be imported, without opening their storage."""
    if context.config is None:
        return
    optional = [tier for tier in context.config.tiers if tier.is_custom or tier.is_remote]
    if not optional:
        yield ok("all tiers are part of kvtier")
    for tier in optional:
        problem = _import_problem(tier)
        if problem:
            yield fail(
                f"tier {tier.name}: {problem}",
                "the server does not start",
                "install the package of the tier, or set PYTHONPATH; type must be module:Class of a SecondaryTier",
            )
        else:
            yield ok(f"tier {tier.name}: {tier.type} can be imported")


def _import_problem(tier: TierConfig) -> str:
    try:
        # The imported module may print. Its output must not mix with the JSON on standard output.
        with contextlib.redirect_stdout(sys.stderr):
            tier_class(tier)
    except TierError as error:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a foreign module may raise anything
        return f"cannot import {tier.type}: {describe_error(error)}"
    return ""
