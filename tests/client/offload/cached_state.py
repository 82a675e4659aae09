"""What the core takes for stored, held against what its server ever had."""

from __future__ import annotations

from model_server import ModelServer

from kvtier.client.offload import CacheGeometry, CacheGroupKind, OffloadCore


def check_beliefs(core: OffloadCore, geometry: CacheGeometry, server: ModelServer) -> None:
    """Asserts that all that is not going to be offered was stored in this life of the server, which the core has heard of."""
    walk = core._walk
    for key in [*walk._stored.values(), *walk._stored_before.values()] if walk is not None else []:
        assert server.may_have(key), "takes a block for stored that this server never had"
    in_flight = {key for held in core._saves._jobs.values() for key in held.job.keys}
    for state in core._requests.values():
        for group in geometry.groups:
            if group.kind is not CacheGroupKind.FULL:
                continue  # some of its blocks are in no table any more
            missed = state.progress.missed.get(group.index, ())
            for position in range(state.progress.cursor(group.index)):
                key = state.engine.key(group, position)
                known = position in missed or key in in_flight or server.may_have(key)
                assert known, (
                    f"{state.engine}: block {position} of group {group.index} is nowhere, and not to be offered"
                )
