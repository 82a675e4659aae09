"""Calls that run in slices, as the server runs them: later events continue or abandon them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from .actors import Actors
from .ledger import Client

if TYPE_CHECKING:
    from .world import World

__all__ = ["Call", "Calls"]

SLICES = (1, 2, 3, None)
"""Keys per slice; None for all. Constant within a call, except while it waits for room."""


class Call:
    """A call of a client. Each slice is an event of its own."""

    kind: ClassVar[str]
    """What the runner calls such calls."""
    event: ClassVar[str]
    """The event that a slice counts as."""

    is_cancellable: ClassVar[bool] = True
    """Whether the client can cancel it. Otherwise the server continues it without the client."""

    def __init__(self, actors: Actors, client: Client) -> None:
        self.actors, self.world, self.client = actors, actors.world, client
        self.session = client.session
        self.size: int | None = actors.rng.choice(SLICES)
        self.slices = 0
        self.last_step = 0

    @property
    def is_ready(self) -> bool:
        """Whether the call need not wait."""
        return True

    def step(self) -> bool:
        """Runs a slice; returns whether slices are left."""
        raise NotImplementedError

    def abandon(self) -> None:
        """The call is cancelled, or its session has ended."""
        raise NotImplementedError


class Calls(Actors):
    """The calls that have begun and not ended."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.open: list[Call] = []

    def actions(self) -> dict[Callable[[], None], float]:
        return {self.abandon_call: 2}

    def begin(self, call: Call) -> None:
        """Adds a call. Its first slice runs at once, or after other events."""
        self.open.append(call)
        if call.is_ready and self.rng.random() < 0.8:
            self._step(call)

    @property
    def ready(self) -> list[Call]:
        return [call for call in self.open if call.is_ready or not self._is_connected(call)]

    def continue_call(self) -> None:
        """The next slice of a call runs. If the session of the call has ended, the call fails."""
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
        return call.client in self.world.ledger.clients

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
