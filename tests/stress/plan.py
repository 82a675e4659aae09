"""What a run does: the stress run, and the rounds of a torture run."""

from __future__ import annotations

from dataclasses import dataclass

from stress.chaos import SLOTS, last_run_start
from stress.client_pool import PAIR_SLOTS
from stress.durable_ledger import DepositPlan

__all__ = ["ACKNOWLEDGEMENTS_PER_KILL", "LARGE", "MORE_KILLS", "Plan", "is_warm", "rounds_of"]

ACKNOWLEDGEMENTS_PER_KILL = 180
LARGE = ("lmdb", "disk")
"""The types of the tier that holds all blocks."""
MORE_KILLS = 1.25
"""Factor of the asked kills after which a round without the asked acknowledgements ends."""
_ROUND_KILLS = 100
"""A start takes longer with more blocks, so each round begins with an empty directory."""
_DEPOSITS_PER_SECOND = 8.0
"""Of each client at most; fewer in a long run, so that deposits continue until the last run."""
_MOST_DEPOSITS = 300
_DEPOSITORS = SLOTS - len(PAIR_SLOTS)
_ROOM = 2
"""How many times the asked acknowledgements the clients of a round may deposit."""
_PACE = 0.1
"""Deposits of a client per second, for each asked acknowledgement per kill."""


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        seed: what all choices follow from.
        large: type of the tier that holds all blocks, one of `LARGE`.
        seconds: how long the load lasts, with faults of all kinds.
        kills: if not 0, a round of a torture run: only the server is killed, so often, at short
            intervals and also while it starts.
        acknowledgements: how many blocks a round must see acknowledged as durable.
        warm: whether a keeper holds the memory of the CPU tier, so that blocks survive there, too.
    """

    seed: int
    large: str
    seconds: float = 0.0
    kills: int = 0
    acknowledgements: int = 0
    warm: bool = False

    @property
    def deposits(self) -> DepositPlan:
        if self.kills:
            most = -(-_ROOM * self.acknowledgements // _DEPOSITORS)
            return DepositPlan(per_second=_PACE * self.acknowledgements / self.kills, most=most, batch=48)
        per_second = min(_DEPOSITS_PER_SECOND, _MOST_DEPOSITS / last_run_start(self.seconds))
        return DepositPlan(per_second=per_second, most=_MOST_DEPOSITS, batch=4)


def rounds_of(seed: int, kills: int, acknowledgements: int, large: str | None, *, warm: bool | None) -> list[Plan]:
    """The rounds of a torture run. Without `large`, the tiers take turns in holding all blocks.

    Without `warm`, half of the rounds have warm restarts.
    """
    number = -(-kills // _ROUND_KILLS)
    return [
        Plan(
            seed + turn,
            large or LARGE[(seed + turn) % 2],
            kills=_share(kills, number, turn),
            acknowledgements=_share(acknowledgements, number, turn),
            warm=is_warm(seed + turn) if warm is None else warm,
        )
        for turn in range(number)
    ]


def is_warm(seed: int) -> bool:
    """Whether a run has warm restarts by default: half of the runs with either large tier."""
    return seed // len(LARGE) % 2 == 0


def _share(total: int, number: int, turn: int) -> int:
    return total * (turn + 1) // number - total * turn // number
