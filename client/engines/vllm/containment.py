"""No hook raises into the engine: what it raises is logged, and it is answered with a fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from .background import LimitedLog

__all__ = ["contained", "no", "nothing"]


class HasLog(Protocol):
    """What has hooks."""

    log: LimitedLog


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=HasLog)


def nothing() -> None:
    """The fallback of a hook whose answer nobody reads."""


def no() -> bool:
    """The fallback of a question."""
    return False


def contained(
    fallback: Callable[[], R],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """What a hook raises is logged, and the engine gets ``fallback()``: an exception inside a connector ends vLLM."""

    def decorate(hook: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(hook)
        def hook_that_answers(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                text = f"{hook.__name__} failed: {error!r}"
                self.log.warn(hook.__name__, text, exc_info=True)  # noqa: G010 - a LimitedLog, not a Logger
                return fallback()

        return hook_that_answers

    return decorate
