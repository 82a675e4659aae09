"""Compares what the offload core considers stored with what its server ever had."""

from __future__ import annotations

from model_server import ModelServer

from kvtier.client.offload import CacheGeometry, CacheGroupKind, OffloadCore


def check_cached_state(core: OffloadCore, geometry: CacheGeometry, server: ModelServer) -> None:
    """Asserts that the server had every block that will not be offered again, since its restart."""
    lazy = core._lookahead
    for key in (*lazy._stored.values(), *lazy._stored_before.values()) if lazy is not None else ():
        assert server.may_have(key), "considers a block stored that this server never had"
    in_flight = {key for _, key in core._saves._in_flight}
    for state in core._requests.values():
        for group in geometry.groups:
            if group.kind is not CacheGroupKind.FULL:
                continue  # some of its blocks are in no table any more
            missed = state.progress.missed.get(group.index, ())
            for position in range(state.progress.cursor(group.index)):
                key = state.engine.key(group, position)
                known = position in missed or key in in_flight or server.may_have(key)
                assert known, f"{state.engine}: block {position} of group {group.index} is neither stored nor offered"
