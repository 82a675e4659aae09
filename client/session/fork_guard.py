"""Guard of objects that have connections, against their use by a forked child.

A child inherits the connections, but not the threads that serve them. Two processes that use one
connection read each other's answers. So in the child the guarded objects refuse all calls, and
nothing closes their connections: gRPC and TLS would send bytes, which belong to the parent.
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
    """Base class of objects with connections. A subclass calls `check_process` in each method."""

    is_forked = False
    """Whether this process is a child that was forked after the construction of the object."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        made = super().__new__(cls)
        _guarded.add(made)
        return made

    def check_process(self) -> None:
        """Raises `ForkedClient` in a forked child."""
        if self.is_forked:
            raise ForkedClient(
                "this client belongs to the process that this process was forked from; construct another one here"
            )

    def forked(self) -> None:
        """Called in the child, on its only thread. It must not wait for a lock or send a byte."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} has connections and threads; construct one in each process")


_guarded: WeakSet[ForkGuarded] = WeakSet()


def _after_fork_in_child() -> None:
    inherited = list(_guarded)
    if inherited:
        # Calls of gRPC that have ended can be in reference cycles. gRPC aborts the process if the
        # garbage collector frees them in the child.
        gc.freeze()
    for each in inherited:
        each.is_forked = True
        # One more reference, which is never released, keeps everything that the object refers to:
        # the destructor of a gRPC channel would shut down the socket that the parent uses.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        with contextlib.suppress(Exception):  # an error here would end the child's start
            each.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
