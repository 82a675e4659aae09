"""Calls that step operations of the core, as the server does.

Later events continue or close the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from kvtier.tiers.core.commands import Change, Waiter
from kvtier.tiers.core.operations import Operation

from .actors import Actors
from .ledger import Client

if TYPE_CHECKING:
    from .world import World

__all__ = ["Call", "Calls"]

SLICES = (1, 2, 3, 1000)
"""Keys per slice; 1000 for all. Constant within a call."""

CHANGES = 3
"""Events that the server reports as a change to the calls that wait for one."""


class Call:
    """A call of a client, whose operation begins with the first step. Each step is an event."""

    kind: ClassVar[str]
    """What the runner calls such calls."""
    event: ClassVar[str]
    """The event that a slice counts as."""

    is_cancellable: ClassVar[bool] = True
    """Whether the client can cancel it. Otherwise the server continues it without the client."""

    begins_at_once: ClassVar[bool] = False
    """Whether the first step is part of the event that begins the call."""

    def __init__(self, actors: Actors, client: Client | None) -> None:
        """`client`: None for an operator."""
        self.actors, self.world = actors, actors.world
        if client is not None:
            self.client, self.session = client, client.session
        self.is_of_client = client is not None
        self.size: int = actors.rng.choice(SLICES)
        self.slices = 0
        self.last_step = 0
        self.operation: Operation[Any] | None = None
        self.has_begun = False
        self.waiter: Waiter | Change | None = None
        """What the operation waits for."""
        self.answer: Any = None

    @property
    def is_ready(self) -> bool:
        """Whether the call need not wait."""
        waiter = self.waiter
        if isinstance(waiter, Change) and self.world.steps - self.last_step > CHANGES:
            return True
        return waiter is None or waiter.until <= self.world.now or (isinstance(waiter, Waiter) and waiter.is_offered)

    def begin(self) -> Operation[Any]:
        """Returns the operation."""
        raise NotImplementedError

    def step(self) -> bool:
        """Steps the operation, and checks the result; returns whether it continues."""
        raise NotImplementedError

    def next_step(self, now: float) -> bool:
        """Steps the operation; returns whether it continues."""
        try:
            operation = self.operation = self.operation or self.begin()
            self.waiter = operation.send(now) if self.has_begun else next(operation)
        except StopIteration as end:
            self.answer, self.waiter = end.value, None
            return False
        finally:
            self.has_begun = True
        return True

    def abandon(self) -> None:
        """The call is cancelled, or its session has ended."""
        if self.operation is not None:
            self.operation.close()


class Calls(Actors):
    """The calls that have begun and not ended."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.open: list[Call] = []

    def actions(self) -> dict[Callable[[], None], float]:
        return {self.abandon_call: 2}

    def begin(self, call: Call) -> None:
        """Adds a call. Its first step comes at once, or after other events."""
        self.open.append(call)
        if call.begins_at_once or self.rng.random() < 0.8:
            self._step(call)

    @property
    def ready(self) -> list[Call]:
        return [call for call in self.open if call.is_ready or not self._is_connected(call)]

    def continue_call(self) -> None:
        """The next step of a call. If the session of the call has ended, the call fails."""
        call = self.rng.choice(self.ready)
        if self._is_connected(call) or (not call.is_cancellable and self.rng.random() < 0.5):
            self._step(call)
        else:
            call.abandon()
            self._end(call)

    def abandon_call(self) -> None:
        """A client cancels a call, or loses its connection."""
        if cancellable := [call for call in self.open if call.is_cancellable]:
            call = self.rng.choice(cancellable)
            self.world.saw(f"{call.kind} abandoned")
            call.abandon()
            self._end(call)

    def _is_connected(self, call: Call) -> bool:
        return not call.is_of_client or call.client in self.world.ledger.clients

    def _step(self, call: Call) -> None:
        self.world.doing = call.event
        if call.slices:
            self.world.saw("events between slices", times=self.world.steps - call.last_step - 1)
        call.slices += 1
        call.last_step = self.world.steps
        if not call.step():
            self.world.saw(f"{call.kind} in slices", call.slices > 1)
            self._end(call)

    def _end(self, call: Call) -> None:
        self.open.remove(call)
