"""Settings of the servers on other hosts from which this server may load blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from .annotations import _duration, _setting, _size
from .units import GIB, MIB, TIB

__all__ = ["PEERS_TIER", "PeersConfig"]

PEERS_TIER = "peers"
"""Name of the tier that loads blocks from other servers."""


class PeersConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Servers of other hosts that a call may name as the source of missing blocks."""

    servers: Annotated[
        tuple[str, ...],
        _setting(
            "Servers that may be named, as `HOST:PORT`. A DNS name, such as the name of a headless service, stands for "
            "all its addresses. It is resolved again every ten seconds.",
            default="none",
        ),
    ] = ()
    ca: Annotated[
        str | None, _setting('CA certificates that verify these servers (PEM file), or "system". Turns on TLS.')
    ] = None
    cert: Annotated[Path | None, _setting("Certificate of this server for them (PEM file). Needs `peers.key`.")] = None
    key: Annotated[Path | None, _setting("Private key of `peers.cert` (PEM file).")] = None
    token_file: Annotated[
        Path | None,
        _setting("File with this server's token for them: a token with the role `reader` for all tenants."),
    ] = None
    deadline: Annotated[
        float,
        _duration("Maximum time to search a server for blocks, and of each load (at most 32 MiB) from it.", 0.05, 5),
    ] = 2.0
    in_flight: Annotated[
        int,
        _size(
            "Maximum size of the blocks that the server is loading from other servers. "
            "A tenant gets at most as much as is then free.",
            MIB,
            TIB,
        ),
    ] = GIB
