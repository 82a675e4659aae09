"""Which blocks a prefix has, and how large they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...protos.v1 import admin_pb2
from ..errors import BreakEvenError
from ..namespace import Group, GroupKind

__all__ = ["CLIENT_NAME", "Geometry", "geometry_of_engines", "lengths_up_to"]

CLIENT_NAME = "kvtier bench"
"""What people see in `kvtier status`, as the client and as the model."""

_MOST_LENGTHS = 6


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV cache groups of an engine, as one of its ranks has them.

    Attributes:
        groups: at least one of them is not of states.
        world_size: ranks that each read their own part, at the same time.
        model: of the engine that it was learned from; empty where it was given.
    """

    groups: tuple[Group, ...]
    world_size: int = 1
    model: str = ""

    @classmethod
    def given(cls, bytes_per_token: int, block_tokens: int) -> Geometry:
        """Returns that of an engine with a single group."""
        return cls((Group(bytes_per_token * block_tokens, block_tokens),))

    @property
    def step_tokens(self) -> int:
        """Tokens after which the blocks of all groups end."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def step_bytes(self) -> int:
        """What that many more tokens add; states add nothing, since only the last one travels."""
        return sum(count * self.groups[index].part_bytes for index, count in self.step_blocks())

    @property
    def bytes_per_token(self) -> float:
        """What each token adds, in bytes."""
        return self.step_bytes / self.step_tokens

    def step_blocks(self) -> list[tuple[int, int]]:
        """Returns each group whose blocks grow with the tokens, and how many one step has of it.

        Sliding windows count as if they were whole, which they are for prefixes that fit into them.
        """
        groups = enumerate(self.groups)
        return [(i, self.step_tokens // g.block_tokens) for i, g in groups if g.kind is not GroupKind.STATE]

    def states(self) -> list[int]:
        """Returns the groups of which one block travels, however long the prefix is."""
        return [index for index, group in enumerate(self.groups) if group.kind is GroupKind.STATE]


def geometry_of_engines(status: admin_pb2.GetStatusResponse, model: str | None) -> Geometry:
    """Returns the geometry of the engines that a server has sessions of; of `model`'s, where it has several.

    Raises:
        BreakEvenError: there is none, or more than one to choose from.
    """
    found = {_geometry(session): None for session in status.sessions if session.client_name != CLIENT_NAME}
    known = [geometry for geometry in found if geometry.groups and geometry.step_bytes]
    chosen = [geometry for geometry in known if model in (None, geometry.model)]
    if not chosen:
        whose = "" if model is None else f" of {model}"
        raise BreakEvenError(f"no engine{whose} is connected to learn the size of KV from: give --kv-bytes-per-token")
    if len(chosen) > 1:
        names = ", ".join(sorted({geometry.model for geometry in chosen}))
        raise BreakEvenError(
            f"engines of several sizes are connected ({names}): name one with --model, or give --kv-bytes-per-token"
        )
    return chosen[0]


def _geometry(session: admin_pb2.SessionStatus) -> Geometry:
    groups = tuple(
        Group(group.part_bytes, group.block_tokens, f"{index}", GroupKind(group.kind or 1))
        for index, group in enumerate(session.groups)
        if group.block_tokens
    )
    return Geometry(groups, session.world_size, session.model)


def lengths_up_to(tokens: int, step: int) -> list[int]:
    """Returns some lengths to measure in whole steps, each about half of the next, the shortest first."""
    halves = (tokens >> number for number in range(_MOST_LENGTHS))
    return sorted({half // step * step for half in halves if half >= step})
