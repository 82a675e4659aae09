"""Block geometry of a prefix: groups, block sizes and lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier.client.namespace import Group, GroupKind
from kvtier.protos.v1 import admin_pb2

from .errors import BreakEvenError

__all__ = ["CLIENT_NAME", "Geometry", "geometry_of_engines", "lengths_up_to"]

CLIENT_NAME = "kvtier bench"
"""Name of client and model in `kvtier status`."""

_MOST_LENGTHS = 6


@dataclass(frozen=True, slots=True)
class Geometry:
    """KV cache groups of one rank of an engine.

    Attributes:
        groups: at least one is not of kind STATE.
        world_size: number of ranks that read their parts at the same time.
        model: model of the engine; empty if the geometry was given.
    """

    groups: tuple[Group, ...]
    world_size: int = 1
    model: str = ""

    @classmethod
    def given(cls, bytes_per_token: int, block_tokens: int) -> Geometry:
        """Returns the geometry of an engine with a single group."""
        return cls((Group(bytes_per_token * block_tokens, block_tokens),))

    @property
    def step_tokens(self) -> int:
        """Step: number of tokens after which the blocks of all groups end."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def step_bytes(self) -> int:
        """Bytes per step without state groups, of which only the last block is transferred."""
        return sum(count * self.groups[index].part_bytes for index, count in self.step_blocks())

    @property
    def bytes_per_token(self) -> float:
        return self.step_bytes / self.step_tokens

    def step_blocks(self) -> list[tuple[int, int]]:
        """Returns (group, blocks per step) for each group whose blocks grow with the tokens.

        All blocks of a sliding window count, which is exact only for prefixes within the window.
        """
        groups = enumerate(self.groups)
        return [(i, self.step_tokens // g.block_tokens) for i, g in groups if g.kind is not GroupKind.STATE]

    def states(self) -> list[int]:
        """Returns the state groups. For any length, one block of each is transferred."""
        return [index for index, group in enumerate(self.groups) if group.kind is GroupKind.STATE]


def geometry_of_engines(status: admin_pb2.GetStatusResponse, model: str | None) -> Geometry:
    """Returns the geometry of the connected engines, or of those with `model`.

    Raises:
        BreakEvenError: there is no such geometry, or more than one.
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
    """Returns the lengths to measure: ascending multiples of `step`, each about half the next."""
    halves = (tokens >> number for number in range(_MOST_LENGTHS))
    return sorted({half // step * step for half in halves if half >= step})
