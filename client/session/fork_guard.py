"""Guard of objects that have connections, against their use by a forked child.

A child inherits the connections, but not the threads that serve them. Two processes that use one
connection disturb each other. So in the child the guarded objects refuse all calls, and nothing
closes their connections: gRPC and TLS would send bytes, which belong to the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from typing import Any, NoReturn
from weakref import WeakSet

import grpc

from ..errors import ForkedClient

__all__ = ["ForkGuarded", "fork_safe"]


def fork_safe(channel: grpc.Channel) -> grpc.Channel:
    """Returns the channel, whose calls gRPC then leaves alone in a forked child.

    Otherwise gRPC cancels them there, and so sends frames on the connection of the parent.
    """
    vars(channel)["_postfork_child"] = lambda: None  # gRPC has no option for it
    return channel


class ForkGuarded:
    """Base class of objects with connections, threads or locks.

    A public method calls `_check_process`, unless it closes the object. In a forked child such a
    method must neither wait for a thread of the parent nor send a byte.
    """

    _is_forked = False
    """Whether this process is a child that was forked after the construction of the object."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        made = super().__new__(cls)
        _guarded.add(made)
        return made

    def _check_process(self) -> None:
        """Raises `ForkedClient` in a forked child."""
        if self._is_forked:
            raise ForkedClient(
                "this client belongs to the process that this process was forked from; construct another one here"
            )

    def _after_fork(self) -> None:
        """Called in the child, on its only thread. The locks of the object are free then."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, because it has connections, threads or locks; "
            "construct one in each process"
        )


_guarded: WeakSet[ForkGuarded] = WeakSet()


def _after_fork_in_child() -> None:
    inherited = list(_guarded)
    if inherited:
        # Calls of gRPC that have ended can be in reference cycles. gRPC aborts the process if the
        # garbage collector frees them in the child.
        gc.freeze()
    for each in inherited:
        each._is_forked = True  # noqa: SLF001 - of this module
        # One more reference, which is never released, keeps everything that the object refers to:
        # the destructor of a gRPC channel would shut down the socket that the parent uses.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        with contextlib.suppress(Exception):  # an error here would end the child's start
            _free_locks(each)
            each._after_fork()  # noqa: SLF001 - of this module


def _free_locks(guarded: ForkGuarded) -> None:
    """Frees the locks, conditions and events that another thread of the parent has held."""
    for value in vars(guarded).values():
        reinit = getattr(value, "_at_fork_reinit", None)  # of all classes of `threading`
        if reinit is not None:
            reinit()


os.register_at_fork(after_in_child=_after_fork_in_child)
