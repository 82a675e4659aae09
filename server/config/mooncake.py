"""Settings of tiers in Mooncake Store: the table `options` of a tier of type `mooncake`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

import msgspec

from ...tiers.remote.mooncake_process import P2P, master_address
from .annotations import InFlight, KeyFilePath, _duration, _setting
from .fields import TableError, read_address, read_table, settings_of
from .units import MIB

__all__ = ["MOONCAKE_OPTIONS", "MooncakeOptions", "read_mooncake_options"]


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Connection of a `mooncake` tier: `[tiers.options]` in the file."""

    master: Annotated[str, _setting("Address of Mooncake's master, `HOST:PORT`.")]
    metadata: Annotated[
        str,
        _setting(
            "How Mooncake finds its nodes: `P2PHANDSHAKE` (they exchange their addresses directly), or the URL of a metadata "
            "server, `http://HOST:PORT/metadata`. The same as at the nodes."
        ),
    ] = P2P
    protocol: Annotated[
        Literal["tcp", "rdma"], _setting("Protocol of transfers: `tcp` or `rdma`. The same as at the nodes.")
    ] = "tcp"
    device: Annotated[
        str | None,
        _setting("RDMA devices, separated by commas, like `mlx5_0,mlx5_1`.", default="those that Mooncake finds"),
    ] = None
    local_host: Annotated[
        str | None,
        _setting(
            "Name or address of this host in the network of the nodes.",
            default="the address with which the server reaches the master",
        ),
    ] = None
    log: Annotated[
        Path | None, _setting("File for the messages of Mooncake's library, which grows.", default="no messages")
    ] = None
    encryption_keys: KeyFilePath = None
    deadline: Annotated[
        float,
        _duration(
            "Maximum time of one call. After it, the blocks of the job are misses, and Mooncake's client starts again.",
            0.01,
            30,
        ),
    ] = 0.25
    in_flight: InFlight = 64 * MIB


MOONCAKE_OPTIONS = settings_of(MooncakeOptions)


def read_mooncake_options(table: Mapping[str, Any]) -> MooncakeOptions:
    """Returns the checked options of a tier. Raises `TableError`."""
    given = read_table(table, MOONCAKE_OPTIONS, "options.")
    read_address(given, "master", "HOST:50051", master_address)
    metadata: SplitResult = read_address({"metadata": P2P, **given}, "metadata", "", urlsplit)
    if metadata.geturl() != P2P and not (metadata.scheme in ("http", "https") and metadata.hostname):
        raise TableError(f"options.metadata: must be {P2P}, or a URL like http://HOST:PORT/metadata")
    if "device" in given and given.get("protocol") != "rdma":
        raise TableError('options.device: only for protocol = "rdma"')
    return MooncakeOptions(**given)
