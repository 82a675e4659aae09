"""Stores that keep descriptors while the server restarts: systemd's, or that of `kvtier keeper`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from .descriptor_messages import FDLIST, HELLO, LIST_END, VERSION, Received, is_name, peer_of, receive, send
from .notify_socket import notify, notify_address

__all__ = ["DescriptorStore", "DescriptorStoreError", "KeeperStore", "SystemdStore", "open_descriptor_store"]

_ANSWER_SECONDS = 30.0
"""Longest wait for each message of the keeper."""
_FIRST_INHERITED = 3
_MOST_INHERITED = 1 << 20


class DescriptorStoreError(Exception):
    """The keeper cannot be used. The message is one line for the operator."""


class DescriptorStore(Protocol):
    """Store of descriptors that outlive the server.

    Names match [a-z0-9-]{1,64}, otherwise methods raise `ValueError`. Several descriptors may have
    one name. Keep a file under one name only, because systemd ignores a second one.
    """

    def take(self) -> list[tuple[str, int]]:
        """Returns what an earlier server left: names and descriptors, which the caller owns.

        The store keeps its own copies until `forget`. Call this before the first `keep`. A second
        call returns nothing. Raises `DescriptorStoreError`.
        """
        ...

    def keep(self, name: str, descriptor: int, *, until_hangup: bool = False) -> None:
        """Stores a duplicate, without waiting. Raises `OSError` if the store does not accept it.

        With `until_hangup` the store drops the duplicate when poll(2) reports POLLHUP or POLLERR.
        The duplicate counts until `forget`, also if the store has dropped it.
        """
        ...

    def forget(self, name: str) -> None:
        """Drops all descriptors with this name, without waiting. Raises `OSError`."""
        ...

    def close(self) -> None:
        """Ends the use of the store, which keeps its descriptors. Idempotent."""
        ...


def open_descriptor_store(keeper: Path | None, environment: Mapping[str, str] = os.environ) -> DescriptorStore | None:
    """Returns the store of the keeper at this Unix socket, otherwise that of systemd, or None.

    systemd 254 and later set FDSTORE to FileDescriptorStoreMax. Raises `DescriptorStoreError` if
    the keeper cannot be reached or refuses.
    """
    if keeper is not None:
        return KeeperStore(keeper)
    address, limit = notify_address(environment), _number(environment, "FDSTORE")
    return SystemdStore(address, limit, environment) if address is not None and limit > 0 else None


class _Count:
    """Number of descriptors that a store has, by name. The store refuses more than `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.unnamed = 0
        self.names: Counter[str] = Counter()

    def check(self, name: str) -> None:
        """Raises `OSError` if the store is full, and `ValueError`."""
        _check_name(name)
        if self.unnamed + self.names.total() >= self.limit:
            raise OSError(errno.ENOSPC, f"the store of descriptors has its maximum of {self.limit}")

    def check_listed(self, listed: int) -> None:
        """Raises `ValueError` if a store lists more descriptors than it can have."""
        if listed > self.limit:
            raise ValueError(f"it lists more than its maximum of {self.limit} descriptors")


class SystemdStore:
    """Store of systemd: FileDescriptorStoreMax= in systemd.service(5).

    systemd silently ignores descriptors above its limit, so this class counts.
    """

    def __init__(self, address: str, limit: int, environment: Mapping[str, str] = os.environ) -> None:
        self._address = address
        self._count = _Count(limit)
        self._inherited: list[tuple[str, int]] = []
        for name, descriptor in _inherited(environment):
            if is_name(name):
                self._inherited.append((name, descriptor))
                self._count.names[name] += 1
            else:  # not from this store, but systemd may count it
                self._count.unnamed += 1

    def take(self) -> list[tuple[str, int]]:
        taken, self._inherited = self._inherited, []
        return taken

    def keep(self, name: str, descriptor: int, *, until_hangup: bool = False) -> None:
        self._count.check(name)
        poll = "" if until_hangup else "\nFDPOLL=0"
        notify(self._address, f"FDSTORE=1\nFDNAME={name}{poll}", [descriptor])
        self._count.names[name] += 1

    def forget(self, name: str) -> None:
        _check_name(name)
        notify(self._address, f"FDSTOREREMOVE=1\nFDNAME={name}")
        del self._count.names[name]

    def close(self) -> None:
        """Closes what was not taken."""
        for _, descriptor in self.take():
            os.close(descriptor)


class KeeperStore:
    """Store of a `kvtier keeper`, which serves one server at a time. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Connects. Raises `DescriptorStoreError`."""
        self._path = path
        self._connection = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        self._is_taken = False
        try:
            with self._problems_named():
                self._count = self._open()
        except BaseException:
            self._connection.close()
            raise

    def take(self) -> list[tuple[str, int]]:
        if self._is_taken:
            return []
        self._is_taken = True
        taken: list[tuple[str, int]] = []
        try:
            with self._problems_named():
                send(self._connection, FDLIST)
                while (listed := _listed(self._next())) is not None:
                    taken.append(listed)
                    self._count.check_listed(len(taken))
        except BaseException:
            for _, descriptor in taken:
                os.close(descriptor)
            raise
        self._count.unnamed = 0
        self._count.names = Counter(name for name, _ in taken)
        return taken

    def keep(self, name: str, descriptor: int, *, until_hangup: bool = False) -> None:
        self._count.check(name)
        poll = {} if until_hangup else {"FDPOLL": "0"}
        send(self._connection, {"FDSTORE": "1", "FDNAME": name, **poll}, descriptor)
        self._count.names[name] += 1

    def forget(self, name: str) -> None:
        _check_name(name)
        send(self._connection, {"FDSTOREREMOVE": "1", "FDNAME": name})
        del self._count.names[name]

    def close(self) -> None:
        self._connection.close()

    def _open(self) -> _Count:
        """Connects and exchanges versions; returns how many descriptors the keeper has."""
        self._connection.connect(os.fspath(self._path))
        _, uid = peer_of(self._connection)
        if uid not in (0, os.geteuid()):
            raise ValueError(f"it belongs to user {uid}, who could read the cache")
        with contextlib.suppress(BrokenPipeError):  # its reason can be read
            send(self._connection, {HELLO: VERSION})
        received = self._next()
        received.close()
        fields = received.fields()
        if (reason := fields.get("REFUSED")) is not None:
            raise DescriptorStoreError(f"the keeper at {self._path} refuses: {reason}")
        if fields.get(HELLO) != VERSION:
            raise ValueError(f"it does not speak version {VERSION} of the protocol")
        count = _Count(int(fields.get("FDSTOREMAX", "")))
        count.unnamed = int(fields.get("FDSTORED", ""))
        return count

    def _next(self) -> Received:
        """Waits for a message of the keeper. Raises `OSError`."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            with contextlib.suppress(BlockingIOError):
                received = receive(self._connection)
                if not received.text:
                    received.close()
                    raise ConnectionResetError(errno.ECONNRESET, "it has closed the connection")
                return received
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {_ANSWER_SECONDS:g} s")

    @contextlib.contextmanager
    def _problems_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DescriptorStoreError(
                f"the keeper at {self._path} cannot be used: {error.strerror or error}; is `kvtier keeper` running?"
            ) from None
        except ValueError as error:
            raise DescriptorStoreError(f"the keeper at {self._path} cannot be used: {error}") from None


def _listed(received: Received) -> tuple[str, int] | None:
    """Returns a name and descriptor of the list; None at its end. Raises `ValueError`."""
    with contextlib.ExitStack() as refused:
        refused.callback(received.close)
        fields = received.fields()
        if fields == LIST_END:
            return None
        name = fields.pop("FDNAME", "")
        if fields != {"FDSTORE": "1"} or not is_name(name) or len(received.descriptors) != 1:
            raise ValueError("it sends an invalid list of descriptors")
        refused.pop_all()
    return name, received.descriptors[0]


def _check_name(name: str) -> None:
    if not is_name(name):
        raise ValueError(f"not a name of a descriptor: {name!r}")


def _number(environment: Mapping[str, str], name: str) -> int:
    """Returns the value of a variable; 0 if it is absent or invalid."""
    try:
        return int(environment.get(name, ""))
    except ValueError:
        return 0


def _inherited(environment: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yields the descriptors of sd_listen_fds(3), closed on exec, with their names.

    Without a valid list of names each name is empty.
    """
    if _number(environment, "LISTEN_PID") != os.getpid():
        return
    count = _number(environment, "LISTEN_FDS")
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    for index in range(min(count, _MOST_INHERITED)):
        try:
            fcntl.fcntl(_FIRST_INHERITED + index, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        except OSError:  # not open
            continue
        yield names[index] if len(names) == count else "", _FIRST_INHERITED + index
