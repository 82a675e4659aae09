"""Trust checks of all files that a configuration names, at the start and in `kvtier doctor`.

`protos/trusted_files.py` has the rule. The code that reads a file checks the file again, so a
running server keeps the previous contents if another user can change the new ones.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ...protos.trusted_files import UntrustedFileError, check_trusted, mode_of_readable
from ..config.machine import existing_directory
from ..config.schema import Config, TierConfig

__all__ = ["file_warnings", "untrusted_files", "untrusted_stores"]

_TIER_FILES = ("password_file", "credentials_file", "tls_ca", "tls_cert", "tls_key")
"""Options of remote tiers. The reader of `encryption_keys` checks this file."""
_SECRETS = {"tls.key", "peers.key", "peers.token_file", "password_file", "credentials_file", "tls_key"}


def untrusted_files(config: Config) -> dict[Path, str]:
    """Returns the files that other users can change, each with a line about it."""
    found = {}
    for setting, path in _files(config):
        try:
            check_trusted(path)
        except UntrustedFileError as error:
            found[path] = f"{setting}: {path}: {error.strerror}"
        except OSError:  # the code that opens the file reports this
            continue
    return found


def untrusted_stores(config: Config, *, create: bool) -> list[str]:
    """Returns a line for each tier directory with files that other users can change.

    With `create`, missing directories are created, for this process's user only.
    """
    problems = []
    for tier in _stores(config):
        try:
            check_trusted(existing_directory(tier.path))
            if create:
                _create_private(tier.path)
                check_trusted(tier.path)  # in /tmp, another user may have created it
            for entry in os.scandir(tier.path):
                with contextlib.suppress(FileNotFoundError):
                    check_trusted(entry.path)
        except UntrustedFileError as error:
            problems.append(f"tier {tier.name}: {tier.path}: {error.strerror}")
        except OSError:  # the tier reports this
            continue
    return problems


def file_warnings(config: Config) -> Iterator[str]:
    """Yields a line for each secret that every user can read and each socket to replace."""
    for setting, path in _files(config):
        if setting.rpartition(": ")[2] in _SECRETS and (mode := mode_of_readable(path)) is not None:
            yield (
                f"{setting}: {path} has mode {mode:04o}, so every user can read the secret: chmod o-rwx {path} "
                "(for a Kubernetes secret, defaultMode), and replace the secret if it may have been read"
            )
    for tier in _stores(config):
        yield from _readable_blocks(tier)
    for endpoint in config.endpoints:
        if endpoint.path is not None:
            with contextlib.suppress(FileNotFoundError):
                try:
                    check_trusted(Path(endpoint.path).parent)
                except UntrustedFileError as error:
                    yield f"listen: {endpoint}: other users can replace the socket and answer clients: {error.strerror}"


def _files(config: Config) -> Iterator[tuple[str, Path]]:
    """Yields each file that the server reads, with its setting."""
    peers = config.peers
    files = {
        "tls.cert": config.tls.cert,
        "tls.key": config.tls.key,
        "tls.client_ca": config.tls.client_ca,
        "auth.tokens": config.auth.tokens,
        "events.keys": config.events.keys,
    }
    if peers.servers:
        ca = None if peers.ca in (None, "system") else Path(peers.ca).expanduser()
        files |= {
            "peers.ca": ca,
            "peers.cert": peers.cert,
            "peers.key": peers.key,
            "peers.token_file": peers.token_file,
        }
    for tier in config.tiers:
        if tier.is_remote:
            given = {name: path for name in _TIER_FILES if (path := tier.options.get(name))}
            files |= {f"tier {tier.name}: {name}": Path(path).expanduser() for name, path in given.items()}
    for setting, path in files.items():
        if path is not None:
            yield setting, path


def _stores(config: Config) -> Iterator[TierConfig]:
    return (tier for tier in config.tiers if not tier.is_remote)


def _create_private(directory: Path) -> None:
    if not directory.exists():
        _create_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def _readable_blocks(tier: TierConfig) -> Iterator[str]:
    with contextlib.suppress(OSError):
        if not tier.path.stat().st_mode & stat.S_IXOTH:
            return
        for entry in os.scandir(tier.path):
            if entry.is_file() and entry.stat().st_mode & stat.S_IROTH:
                yield f"tier {tier.name}: every user can read the blocks in {entry.path}: chmod -R o-rwx {tier.path}"
                return
