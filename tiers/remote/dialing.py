"""New connections to a Valkey or Redis server: name resolution, TCP, TLS, and authentication."""

from __future__ import annotations

import ipaddress
import queue
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .object_store import StoreRefusedError, StoreUnavailableError
from .resp import ErrorAnswer, RespConnection, command

__all__ = ["Dialer", "ServerAddress", "is_local"]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Host and port of a server."""

    host: str
    port: int
    may_be_local: bool = field(default=True, compare=False)
    """False for a node that another host has named: its name may not lead to this host."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Dialer:
    """Opens authenticated connections. The files are read at each connection."""

    database: int = 0
    username: str | None = None
    password_file: Path | None = None
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def dial(self, endpoint: ServerAddress, ends_at: float) -> RespConnection:
        """Connects until a time on the monotonic clock.

        Raises `StoreUnavailableError` and `StoreRefusedError`.
        """
        try:
            password = self.password_file.read_text(encoding="utf-8").strip() if self.password_file else None
            context = self._tls_context() if self.tls else None
        except ssl.SSLError as error:
            raise StoreUnavailableError(f"cannot use the TLS files: {error}") from error
        except OSError as error:
            raise StoreUnavailableError(f"cannot read {error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise StoreUnavailableError(f"cannot read {self.password_file}: {error}") from error
        sock = _connect(endpoint, ends_at)
        try:
            if context is not None:
                sock.settimeout(_seconds_until(ends_at))
                sock = context.wrap_socket(sock, server_hostname=endpoint.host)
            connection = RespConnection(sock)
            connection.set_deadline(ends_at)
            self._log_in(connection, password)
        except OSError as error:
            sock.close()
            raise StoreUnavailableError(f"cannot connect: {_text_of(error)}") from error
        except BaseException:
            sock.close()
            raise
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.tls_ca)
        if self.tls_cert:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        return context

    def _log_in(self, connection: RespConnection, password: str | None) -> None:
        commands = []
        if password is not None:
            commands.append([b"AUTH", *([self.username.encode()] if self.username else []), password.encode()])
        if self.database:
            commands.append([b"SELECT", b"%d" % self.database])
        commands.append([b"CLIENT", b"SETNAME", b"kvtier"])
        connection.send([b"".join(command(*each) for each in commands)])
        answers = [connection.read() for _ in commands]
        for answer in answers[:-1]:  # the name is only for the operator of the store
            if isinstance(answer, ErrorAnswer):
                raise StoreRefusedError(answer.text)


def is_local(host: str) -> bool:
    """Returns whether an address is one of this host, of its link, or of no single host."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.rstrip(".").lower().endswith("localhost")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return any((mapped.is_loopback, mapped.is_link_local, mapped.is_unspecified, mapped.is_multicast))


def _connect(endpoint: ServerAddress, ends_at: float) -> socket.socket:
    """Connects to the first address of a host that accepts."""
    failure: OSError = OSError("the host has no address")
    for family, kind, protocol, _, address in _resolve(endpoint, ends_at):
        if is_local(address[0]) and not endpoint.may_be_local:
            failure = OSError("its name has an address of this host")
            continue
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_seconds_until(ends_at))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise StoreUnavailableError(f"cannot connect: {_text_of(failure)}") from failure


def _resolve(endpoint: ServerAddress, ends_at: float) -> list[Any]:
    """Resolves a host. A thread does it, because the system's resolver has no deadline."""

    def addresses() -> list[Any]:
        return socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)

    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        pass
    else:
        return addresses()
    answers: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            answers.put(addresses())
        except OSError as error:
            answers.put(error)

    try:
        threading.Thread(target=resolve, name="kvtier-resolve", daemon=True).start()
    except RuntimeError as error:  # no thread available
        raise StoreUnavailableError(f"cannot resolve {endpoint.host}: {error}") from error
    try:
        answer = answers.get(timeout=max(0.0, ends_at - time.monotonic()))
    except queue.Empty:
        raise StoreUnavailableError(f"cannot resolve {endpoint.host} before the deadline") from None
    if isinstance(answer, OSError):
        raise StoreUnavailableError(f"cannot resolve {endpoint.host}: {answer.strerror}") from answer
    return answer


def _seconds_until(ends_at: float) -> float:
    left = ends_at - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _text_of(error: OSError) -> str:
    return "no answer before the deadline" if isinstance(error, TimeoutError) else error.strerror or str(error)
