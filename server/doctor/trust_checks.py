"""Checks of TLS, token and key files, also of `[peers]`: contents, expiry dates, permissions."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from ...protos.credentials import Credentials, CredentialsError
from ...protos.endpoint import Endpoint
from ..auth.credential_files import FileError
from ..auth.file_checks import file_warnings, untrusted_files, untrusted_stores
from ..auth.tls_files import TlsError, TlsFiles, last_expiry, read_files
from ..auth.tokens import read_token_file
from ..config.peers import PeersConfig
from ..config.remote import key_files_of
from ..config.units import human_age
from ..tier_host.key_file import read_key_file
from .finding import CheckContext, CheckResult, fail, ok, warn

__all__ = ["trust"]

_SOON_SECONDS = 14 * 86400
_NO_START = "the server does not start; a running server keeps the previous contents in use"
_NO_LOADS = "no blocks are loaded from the servers of [peers]; engines compute them"
_RENEW = "replace the file; a running server uses the new file from the next connection on"


def trust(context: CheckContext) -> Iterator[CheckResult]:
    config = context.config
    if config is None:
        return
    if config.tls.cert is None and config.auth.tokens is None:
        yield ok("neither TLS nor tokens are configured")
    untrusted = untrusted_files(config)
    for problem in (*untrusted.values(), *untrusted_stores(config, create=False)):
        seen, _, do = problem.rpartition(": ")
        yield fail(seen, f"another user can take over the server; {_NO_START}", do)
    for warning in file_warnings(config):
        seen, _, do = warning.rpartition(": ")
        yield warn(seen, "other users can read blocks, or impersonate the server", do)
    tls = {config.tls.cert, config.tls.key, config.tls.client_ca}
    if config.tls.cert is not None and config.tls.key is not None and not tls & untrusted.keys():
        yield from _tls(config.tls.cert, config.tls.key, config.tls.client_ca)
    if config.auth.tokens is not None and config.auth.tokens not in untrusted:
        yield from _tokens(config.auth.tokens)
    for tier, path in key_files_of(config.tiers):
        yield _keys(tier, path)
    if config.peers.servers:
        yield from _peers(config.peers, untrusted.keys())


def _tls(cert: Path, key: Path, client_ca: Path | None) -> Iterator[CheckResult]:
    try:
        files = read_files(str(cert), str(key), str(client_ca) if client_ca else None)
    except TlsError as error:
        yield fail(
            str(error),
            _NO_START,
            f"correct tls.cert, tls.key, tls.client_ca, or the files for user {os.getuid()}; docs/security.md#tls",
        )
    else:
        yield _certificate(cert, files)
        if client_ca is not None:
            yield _authorities(client_ca, files)


def _certificate(path: Path, files: TlsFiles) -> CheckResult:
    left = _left(files.cert_expires)
    if files.out_of_date:
        return fail(
            f"{path}: {files.out_of_date}", "every client refuses the certificate", f"{_RENEW}; or set the clock"
        )
    if left is not None and left < _SOON_SECONDS:
        return warn(
            f"{path} expires in {human_age(left)}", "after this time every client refuses the certificate", _RENEW
        )
    return ok(f"{path} and its key can be used{_for(left)}")


def _authorities(path: Path, files: TlsFiles) -> CheckResult:
    left = _left(files.client_ca_expires)
    if left is not None and left <= 0:
        return fail(f"{path}: all client CAs have expired", "the server refuses every client", _RENEW)
    if left is not None and left < _SOON_SECONDS:
        return warn(
            f"{path}: the last client CA expires in {human_age(left)}",
            "after this time the server refuses every client",
            _RENEW,
        )
    return ok(f"{path}: the client CAs can be used{_for(left)}")


def _left(expires: float | None) -> float | None:
    return None if expires is None else expires - time.time()


def _for(left: float | None) -> str:
    return "" if left is None else f" for {human_age(left)}"


def _tokens(path: Path) -> Iterator[CheckResult]:
    try:
        directory = read_token_file(path)
    except FileError as error:
        yield fail(
            str(error), _NO_START, f"correct auth.tokens or the file; user {os.getuid()} must be able to read the file"
        )
    else:
        entries = (*directory.tokens.values(), *directory.certificates.values())
        now = time.time()
        expired = sum(known.identity_at(now) is None for known in entries)
        seen = (
            f"{path}: tokens: {len(directory.tokens)}, certificates: {len(directory.certificates)}, expired: {expired}"
        )
        if expired == len(entries):
            yield warn(
                seen,
                "no token or certificate is accepted",
                f"kvtier token new --role engine --tenant NAME --file {path}; a running server reads it within seconds",
            )
        else:
            yield ok(seen)


def _keys(tier: str, path: Path) -> CheckResult:
    try:
        read_key_file(path)
    except FileError as error:
        return fail(
            f"tier {tier}: {error}",
            _NO_START,
            f"correct encryption_keys or the file for user {os.getuid()}; docs/shared-tiers.md#encryption",
        )
    return ok(f"tier {tier}: {path} can be used")


def _peers(peers: PeersConfig, untrusted: AbstractSet[Path]) -> Iterator[CheckResult]:
    """Checks this server's credentials at other servers."""
    ca = Path(peers.ca).expanduser() if peers.ca is not None and peers.ca != "system" else None
    tls = [path for path in (ca, peers.cert, peers.key) if path is not None]
    if tls and not untrusted & set(tls):
        yield _peers_tls(peers, ca, tls)
    if peers.token_file is not None and peers.token_file not in untrusted:
        yield _peers_token(peers.token_file)


def _peers_tls(peers: PeersConfig, ca: Path | None, files: Sequence[Path]) -> CheckResult:
    names = ", ".join(map(str, files))
    cert, key = (None if path is None else str(path) for path in (peers.cert, peers.key))
    credentials = Credentials(ca=peers.ca, cert=cert, key=key)
    dates: list[float] = []
    try:
        # Its errors name the file.
        credentials.channel(Endpoint(host="localhost", port=1)).close()
        credentials.socket_context("kvtier")
        if peers.cert is not None:
            own = read_files(str(peers.cert), str(peers.key), None)
            dates += [0.0] if own.out_of_date else filter(None, [own.cert_expires])
        if ca is not None:
            dates += filter(None, [last_expiry(str(ca))])
    except (CredentialsError, TlsError) as error:
        return fail(
            f"peers: {error}",
            _NO_LOADS,
            f"correct peers.ca, peers.cert, peers.key, or the files for user {os.getuid()}; docs/peers.md#settings",
        )
    left = _left(min(dates, default=None))
    if left is not None and left <= 0:
        return fail(f"peers: a certificate is not valid now: {names}", _NO_LOADS, f"{_RENEW}; or set the clock")
    if left is not None and left < _SOON_SECONDS:
        return warn(
            f"peers: a certificate expires in {human_age(left)}: {names}", f"after this time {_NO_LOADS}", _RENEW
        )
    return ok(f"peers: usable{_for(left)}: {names}")


def _peers_token(path: Path) -> CheckResult:
    try:
        Credentials(token_file=str(path)).channel(Endpoint(path="/")).close()
    except CredentialsError as error:
        return fail(
            f"peers: {error}",
            _NO_LOADS,
            f"correct peers.token_file, or write a token into the file that user {os.getuid()} can read",
        )
    return ok(f"peers: {path} has a token")
