"""The files that say who may come in: can they be read, do they hold for now, and may others change them."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ..auth.tls import TlsError, TlsFiles, read_files
from ..auth.tokens import TokensError, read_directory
from ..config.units import human_age
from .finding import CheckContext, CheckResult, fail, ok, warn

__all__ = ["trust"]

_SOON_SECONDS = 14 * 86400
_NO_START = "the server does not start; one that runs goes on with what it has read before"
_RENEW = "put a new one in its place: a server that runs takes it with the next connection"


def trust(scene: CheckContext) -> Iterator[CheckResult]:
    """Can the certificate, its key and the tokens be used, do they hold for now, and who can read and change the files."""
    config = scene.config
    if config is None:
        return
    if config.tls.cert is None and config.auth.tokens is None:
        yield ok("neither TLS nor tokens are wanted")
    if config.tls.cert is not None and config.tls.key is not None:
        yield from _tls(config.tls.cert, config.tls.key, config.tls.client_ca)
    if config.auth.tokens is not None:
        yield from _tokens(config.auth.tokens)


def _tls(cert: Path, key: Path, client_ca: Path | None) -> Iterator[CheckResult]:
    try:
        files = read_files(str(cert), str(key), str(client_ca) if client_ca else None)
    except TlsError as error:
        yield fail(
            str(error),
            _NO_START,
            f"correct tls.cert, tls.key or tls.client_ca, or files that user {os.getuid()} cannot use; docs/security.md#tls",
        )
    else:
        yield _certificate(cert, files)
        if client_ca is not None:
            yield _authorities(client_ca, files)
    yield from _written_by_others(cert, "whoever does can have every client refuse the server")
    yield from _written_by_others(key, "whoever does can have every client refuse the server")
    if client_ca is not None:
        yield from _written_by_others(client_ca, "whoever does can vouch for himself")
    if (mode := _mode(key)) & stat.S_IROTH:
        yield warn(
            f"{key} has mode {mode:04o}: every user can read the private key",
            "whoever does can answer in the server's stead",
            f"chmod o-rwx {key} (a Kubernetes secret: defaultMode); a new key, if somebody may have",
        )


def _certificate(path: Path, files: TlsFiles) -> CheckResult:
    left = _left(files.cert_expires)
    if files.out_of_date:
        return fail(f"{path}: {files.out_of_date}", "every client refuses it", f"{_RENEW}; or set the clock")
    if left is not None and left < _SOON_SECONDS:
        return warn(f"{path} expires in {human_age(left)}", "every client refuses it from then on", _RENEW)
    return ok(f"{path} and its key can be used{_for(left)}")


def _authorities(path: Path, files: TlsFiles) -> CheckResult:
    left = _left(files.client_ca_expires)
    if left is not None and left <= 0:
        return fail(f"{path}: all in it have expired", "every client is refused", _RENEW)
    if left is not None and left < _SOON_SECONDS:
        return warn(f"{path}: the last in it expires in {human_age(left)}", "every client is refused then", _RENEW)
    return ok(f"{path}, who vouch for clients, can be used{_for(left)}")


def _left(expires: float | None) -> float | None:
    return None if expires is None else expires - time.time()


def _for(left: float | None) -> str:
    return "" if left is None else f" for {human_age(left)}"


def _tokens(path: Path) -> Iterator[CheckResult]:
    try:
        directory = read_directory(path)
    except TokensError as error:
        yield fail(
            str(error), _NO_START, f"correct auth.tokens, or the file, which user {os.getuid()} must be able to read"
        )
    else:
        entries = (*directory.tokens.values(), *directory.certificates.values())
        now = time.time()
        expired = sum(known.at(now) is None for known in entries)
        seen = (
            f"{path}: tokens: {len(directory.tokens)}, certificates: {len(directory.certificates)}, expired: {expired}"
        )
        if expired == len(entries):
            yield warn(
                seen,
                "nobody gets in with a token or a certificate",
                f"kvtier token new --role engine --tenant NAME --file {path}: it counts within seconds",
            )
        else:
            yield ok(seen)
    yield from _written_by_others(path, "whoever does can give himself every role and every tenant")


def _written_by_others(path: Path, why: str) -> Iterator[CheckResult]:
    mode = _mode(path)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield warn(f"{path} has mode {mode:04o}: others than its owner can write to it", why, f"chmod go-w {path}")


def _mode(path: Path) -> int:
    """Returns a file's permissions; none where it cannot be looked at, which is said elsewhere."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0
