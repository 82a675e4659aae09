"""Stores that keep descriptors while the server restarts: systemd's, or that of `kvtier keeper`."""

from __future__ import annotations

import abc
import contextlib
import errno
import fcntl
import os
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from .descriptor_messages import FDLIST, HELLO, LIST_END, VERSION, Received, is_name, message_of, peer_of, receive, send
from .notify_socket import notify, notify_address

__all__ = ["DescriptorStore", "DescriptorStoreError", "KeeperStore", "SystemdStore", "open_descriptor_store"]

_ANSWER_SECONDS = 30.0
"""Longest wait for each message of the keeper."""
_ROOM_SECONDS = 0.5
"""Longest wait for room in the queue of the keeper, which reads hundreds of messages in 1 ms."""
_FIRST_INHERITED = 3
_MOST_INHERITED = 1 << 20


class DescriptorStoreError(Exception):
    """The keeper cannot be used. The message is one line for the operator."""


class DescriptorStore(Protocol):
    """Store of descriptors that outlive the server.

    Names match [a-z0-9-]{1,64}, otherwise methods raise `ValueError`. Several descriptors may have
    one name. Keep a file under one name only, because systemd ignores a second one. If the queue of
    the store is full, methods wait at most `_ROOM_SECONDS`, and not again before it has had room.
    """

    def take(self) -> list[tuple[str, int]]:
        """Returns what an earlier server left: names and descriptors, which the caller owns.

        The store keeps its own copies until `forget`. Call this before the first `keep`. A second
        call returns nothing. Raises `DescriptorStoreError`.
        """
        ...

    def keep(self, name: str, descriptor: int, *, until_hangup: bool = False) -> None:
        """Stores a duplicate. Raises `OSError` if the store does not accept it.

        With `until_hangup` the store drops the duplicate when poll(2) reports POLLHUP or POLLERR.
        The duplicate counts until `forget`, also if the store has dropped it.
        """
        ...

    def forget(self, name: str) -> None:
        """Drops all descriptors with this name. Raises `OSError`; the next call tries again."""
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


class _CountedStore(abc.ABC):
    """What both stores do: they count the descriptors by name, and wait for room in the queue.

    They count because systemd silently ignores descriptors above its limit.
    """

    def __init__(self) -> None:
        self._limit = 0
        self._unnamed = 0
        """Descriptors of an earlier server whose names this one does not know."""
        self._names: Counter[str] = Counter()
        self._unsent: deque[str] = deque()
        """Names that the store must still forget."""
        self._has_room = True

    def keep(self, name: str, descriptor: int, *, until_hangup: bool = False) -> None:
        _check_name(name)
        self._send_unsent()
        if self._unnamed + self._names.total() >= self._limit:
            raise OSError(errno.ENOSPC, f"the store of descriptors has its maximum of {self._limit}")
        poll = {} if until_hangup else {"FDPOLL": "0"}
        self._send({"FDSTORE": "1", "FDNAME": name, **poll}, descriptor)
        self._names[name] += 1

    def forget(self, name: str) -> None:
        _check_name(name)
        self._unsent.append(name)
        self._send_unsent()

    def _send_unsent(self) -> None:
        while self._unsent:
            self._send({"FDSTOREREMOVE": "1", "FDNAME": self._unsent[0]})
            del self._names[self._unsent.popleft()]

    def _send(self, fields: Mapping[str, str], descriptor: int | None = None) -> None:
        deadline = time.monotonic() + (_ROOM_SECONDS if self._has_room else 0.0)
        self._has_room = False
        while True:
            try:
                self._send_now(fields, descriptor)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.001)
        self._has_room = True

    @abc.abstractmethod
    def _send_now(self, fields: Mapping[str, str], descriptor: int | None) -> None:
        """Sends a message without waiting. Raises `OSError`, also if the queue is full."""


class SystemdStore(_CountedStore):
    """Store of systemd: FileDescriptorStoreMax= in systemd.service(5)."""

    def __init__(self, address: str, limit: int, environment: Mapping[str, str] = os.environ) -> None:
        super().__init__()
        self._address, self._limit = address, limit
        self._inherited: list[tuple[str, int]] = []
        for name, descriptor in _inherited(environment):
            if is_name(name):
                self._inherited.append((name, descriptor))
                self._names[name] += 1
            else:  # not from this store, but systemd may count it
                self._unnamed += 1

    def take(self) -> list[tuple[str, int]]:
        taken, self._inherited = self._inherited, []
        return taken

    def close(self) -> None:
        """Closes what was not taken."""
        for _, descriptor in self.take():
            os.close(descriptor)

    def _send_now(self, fields: Mapping[str, str], descriptor: int | None) -> None:
        notify(self._address, message_of(fields), [] if descriptor is None else [descriptor])


class KeeperStore(_CountedStore):
    """Store of a `kvtier keeper`, which serves one server at a time. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Connects. Raises `DescriptorStoreError`."""
        super().__init__()
        self._path = path
        self._connection = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        self._is_taken = False
        try:
            with self._problems_named():
                self._open()
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
                    self._check_listed(len(taken))
        except BaseException:
            for _, descriptor in taken:
                os.close(descriptor)
            raise
        self._unnamed = 0
        self._names = Counter(name for name, _ in taken)
        return taken

    def close(self) -> None:
        self._connection.close()

    def _send_now(self, fields: Mapping[str, str], descriptor: int | None) -> None:
        send(self._connection, fields, descriptor)

    def _check_listed(self, listed: int) -> None:
        if listed > self._limit:
            raise ValueError(f"it lists more than its maximum of {self._limit} descriptors")

    def _open(self) -> None:
        """Connects and exchanges versions."""
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
        self._limit, self._unnamed = int(fields.get("FDSTOREMAX", "")), int(fields.get("FDSTORED", ""))

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
