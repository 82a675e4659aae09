"""The configuration, the socket and what answers there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from ... import __version__
from ...protos.endpoint import Endpoint, default_endpoint, parse_endpoint
from ...tiers.base import TierError
from ..config.schema import TierConfig
from ..config.units import human_age, human_size, seconds_of
from ..rpc.sessions import PROTOCOL_VERSIONS
from ..rpc.sockets import trouble_with_port
from ..tier_host.factory import tier_class
from ..tier_host.guard import describe_error
from .finding import CheckContext, CheckResult, fail, ok, warn

__all__ = ["configuration", "ports", "server", "socket_file", "tiers", "versions"]


_START = "start one: kvtier serve"


_REMEDIES = {
    "UNAUTHENTICATED": "show what it knows: --token-file (KVTIER_TOKEN_FILE), or --cert and --key; docs/security.md",
    "TIMEOUT": "does it hang (its log, its CPU), is a firewall in between? docs/troubleshooting.md#kvtier-server-not-answering",
    "TLS": "--ca (KVTIER_CA) must vouch for its certificate, and --cert and --key must be whom it knows; docs/security.md",
}


def configuration(scene: CheckContext) -> Iterator[CheckResult]:
    """Can a server start with what file, environment and flags say."""
    for problem in scene.problems:
        yield fail(
            problem,
            "kvtier serve ends with exit code 78",
            "correct it; kvtier config shows where each value comes from",
        )
    for warning in scene.warnings:
        yield warn(
            warning, "it is allowed, and may not be what is meant", "kvtier config shows where each value comes from"
        )
    if scene.config is not None and not scene.warnings:
        yield ok(
            f"can be used: {human_size(scene.config.region_size)} of memory, tiers below it: {len(scene.config.tiers)}"
        )


def socket_file(scene: CheckContext) -> Iterator[CheckResult]:
    """Is the socket there, whose is it, and does somebody listen."""
    if scene.endpoint.path is None:
        yield ok(f"{scene.endpoint} is TCP: there is no socket file to look at")
        return
    path = Path(scene.endpoint.path)
    try:
        status = path.lstat()
    except PermissionError:
        yield fail(
            f"{path.parent} cannot be entered by user {os.getuid()}",
            "neither the server's socket nor its companions can be reached",
            "run this as the server's user, or choose a directory that both can enter",
        )
        return
    except (FileNotFoundError, NotADirectoryError):
        yield from _absent(path)
        return
    if not stat.S_ISSOCK(status.st_mode):
        yield fail(f"{path} is no socket", "a server refuses to start on it", "move it away, or choose another path")
        return
    yield from _ownership(path, status)
    if (trouble := _connect(path)) is not None:
        yield _nobody(path, trouble)


def _absent(path: Path) -> Iterator[CheckResult]:
    directory = next(parent for parent in path.parents if parent.exists())
    if not os.access(directory, os.W_OK | os.X_OK):
        yield fail(
            f"{path} is not there, and user {os.getuid()} cannot write to {directory}",
            "a server could not make its socket",
            "choose another path (--listen unix:PATH), or make the directory the server's",
        )
    else:
        yield warn(
            f"{path} is not there: no server runs here", "engines compute everything themselves meanwhile", _START
        )


def _ownership(path: Path, status: os.stat_result) -> Iterator[CheckResult]:
    own, mode = os.getuid(), stat.S_IMODE(status.st_mode)
    if status.st_uid != own and path == Path(default_endpoint().path or ""):
        yield fail(
            f"{path} belongs to user {status.st_uid}, not to {own}",
            "whoever made it in this user's own place could read and answer in the server's stead",
            "find out who did, remove it, and start the server again",
        )
    elif not os.access(path, os.R_OK | os.W_OK):
        yield fail(
            f"{path} belongs to user {status.st_uid}, mode {mode:04o}: user {own} cannot connect",
            "every call ends in a miss",
            "run engines and this command as the server's user, or listen where both can connect",
        )
    elif mode & 0o077:
        yield warn(
            f"{path} has mode {mode:04o}",
            "others than its owner can connect: whoever does can read and write the cache",
            f"chmod 600 {path}; the server itself makes it so at its start",
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


def _nobody(path: Path, trouble: OSError) -> CheckResult:
    if trouble.errno != errno.ECONNREFUSED:
        return fail(
            f"{path}: {trouble.strerror or trouble}",
            "no call gets through",
            "look at its permissions, and at the server",
        )
    if _is_locked(path.with_name(f"{path.name}.lock")):
        return fail(
            f"{path}: nobody listens, and its lock is held",
            "a server is starting, ending, or stands still",
            "look at its log; it should serve or end within a minute",
        )
    return fail(
        f"{path} is stale: a server was killed and left it, and nobody listens",
        "engines compute everything themselves until a server runs again",
        f"{_START}; it replaces the socket",
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


def server(scene: CheckContext) -> Iterator[CheckResult]:
    """Does a server answer, and is it well."""
    status = scene.status
    if status is None and scene.reason == "PERMISSION_DENIED":
        yield ok(
            f"answers at {scene.endpoint}: version {scene.server_version}; how it is, it tells a token of an admin"
        )
        return
    if status is None and scene.reason:
        why = "an engine with the same settings only meets misses"
        yield fail(
            scene.silence, why, _REMEDIES.get(scene.reason, "as it says: docs/troubleshooting.md, errors by reason")
        )
        return
    if status is None:
        there = scene.endpoint.path is None or _is_listening(scene.endpoint)
        judge = fail if there else warn
        yield judge(scene.silence, "without a server engines compute everything themselves", _START)
        return
    state = (
        f"version {status.server_version}, up {human_age(seconds_of(status.uptime))}, {len(status.sessions)} sessions"
    )
    yield ok(f"answers at {scene.endpoint}: {state}")
    if status.draining:
        yield warn("it takes no new work", "nothing new is stored", "kvtier drain --undo, unless it is about to end")
    for tier in status.tiers:
        if not tier.healthy:
            yield warn(
                f"tier {tier.name}: {tier.trouble}",
                "the server goes on without that",
                "docs/troubleshooting.md#a-tier-is-in-trouble",
            )
    if status.quarantined_bytes:
        yield warn(
            f"{human_size(status.quarantined_bytes)} are in quarantine",
            "processes that lost their stores might still write there",
            "end or wake who has the memory mapped and is no session: grep -ls memfd:kvtier /proc/[0-9]*/maps",
        )


def _is_listening(endpoint: Endpoint) -> bool:
    path = Path(endpoint.path or "")
    return path.is_socket() and _connect(path) is None


def versions(scene: CheckContext) -> Iterator[CheckResult]:
    """Do this command, and so the clients installed beside it, and the server speak the same."""
    if not scene.protocol_versions:
        yield ok(
            f"kvtier {__version__} here speaks protocol {_numbers(PROTOCOL_VERSIONS)}; no server to compare it with"
        )
    elif not set(scene.protocol_versions) & set(PROTOCOL_VERSIONS):
        yield fail(
            f"the server ({scene.server_version}) speaks protocol {_numbers(scene.protocol_versions)}, "
            f"kvtier {__version__} here {_numbers(PROTOCOL_VERSIONS)}",
            "every session is refused",
            "install the same version of kvtier with the server and with the engines",
        )
    elif scene.server_version != __version__:
        yield warn(
            f"the server is {scene.server_version}, kvtier here {__version__}; both speak protocol "
            f"{_numbers(scene.protocol_versions)}",
            "they work together, and what only one of them knows is not used",
            "install the same version on both sides when it suits",
        )
    else:
        yield ok(f"both sides are {__version__}, protocol {_numbers(scene.protocol_versions)}")


def _numbers(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions))


def ports(scene: CheckContext) -> Iterator[CheckResult]:
    """Are the TCP ports free that a server would take, where none runs."""
    config = scene.config
    if config is None:
        return
    addresses = [endpoint for endpoint in config.endpoints if not endpoint.is_unix]
    addresses += [parse_endpoint(config.metrics)] if config.metrics else []
    if not addresses:
        yield ok("none is wanted")
    for address in addresses:
        trouble = trouble_with_port(address) if address.port else None
        if trouble is None:
            yield ok(f"{address} is free")
        elif scene.status is not None and trouble.errno == errno.EADDRINUSE:
            yield ok(f"{address} is in use, as it is when the server has it")
        else:
            yield fail(
                f"{address}: {trouble.strerror}",
                "a server could not start",
                "choose another port (--listen, --metrics), or end who has it: ss -ltnp",
            )


def tiers(scene: CheckContext) -> Iterator[CheckResult]:
    """Can the classes be imported that the tables of tiers name. None of them is made: that would open its storage."""
    if scene.config is None:
        return
    custom = [tier for tier in scene.config.tiers if tier.is_custom]
    if not custom:
        yield ok("all of them are part of kvtier")
    for tier in custom:
        trouble = _trouble(tier)
        if trouble:
            yield fail(
                f"tier {tier.name}: {trouble}",
                "the server does not start",
                "install its package beside kvtier, or set PYTHONPATH; type is module:Class, of a SecondaryTier",
            )
        else:
            yield ok(f"tier {tier.name}: {tier.type} can be imported")


def _trouble(tier: TierConfig) -> str:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a module prints is no part of the JSON
            tier_class(tier)
    except TierError as error:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - somebody else's module may raise anything
        return f"cannot import {tier.type}: {describe_error(error)}"
    return ""
