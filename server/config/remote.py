"""Settings of tiers in remote stores: the table `options` of tiers in other hosts' stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...tiers.remote.valkey import ValkeyAddress
from .annotations import InFlight, KeyFilePath, _duration, _setting
from .fields import TableError, read_address, read_table, settings_of
from .mooncake import MooncakeOptions, read_mooncake_options
from .s3 import S3Options, read_s3_options
from .schema import TierConfig
from .units import MIB

__all__ = [
    "NO_FILES",
    "VALKEY_OPTIONS",
    "ValkeyOptions",
    "key_files_of",
    "read_remote_options",
    "read_valkey_options",
]

NO_FILES = ("path", "durability")
"""Settings that a tier without files on this host does not have."""


class ValkeyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Connection of a `valkey` tier: `[tiers.options]` in the file."""

    url: Annotated[
        str,
        _setting(
            "Address of the Valkey or Redis server: `valkey://HOST:PORT/DATABASE`, or `valkeys://` for TLS. The port is "
            "6379 and the database is 0 by default. Of a cluster, one or more nodes: `valkey://HOST:PORT,HOST:PORT`."
        ),
    ]
    username: Annotated[str | None, _setting("ACL user. Needs `password_file`.", default="the default user")] = None
    password_file: Annotated[
        Path | None, _setting("File with the password. It is read at each connection.", default="no authentication")
    ] = None
    tls_ca: Annotated[
        Path | None,
        _setting(
            "Certificates of the authorities that sign the store's certificate (PEM).", default="those of the system"
        ),
    ] = None
    tls_cert: Annotated[
        Path | None, _setting("Certificate of this server for the store (PEM). Needs `tls_key`.", default="none")
    ] = None
    tls_key: Annotated[Path | None, _setting("Private key of `tls_cert` (PEM).", default="none")] = None
    encryption_keys: KeyFilePath = None
    deadline: Annotated[
        float, _duration("Maximum time of one call of the store. After it, the blocks of the job are misses.", 0.01, 5)
    ] = 0.25
    in_flight: InFlight = 64 * MIB


VALKEY_OPTIONS = settings_of(ValkeyOptions)


def read_remote_options(tier_type: str, table: Mapping[str, Any]) -> ValkeyOptions | S3Options | MooncakeOptions:
    """Returns the checked options of a remote tier. Raises `TableError`."""
    options = table.get("options", {})
    if not isinstance(options, Mapping):
        raise TableError("options: must be a table, [tiers.options]")
    for key in NO_FILES:
        if key in table:
            raise TableError(f"{key}: a tier of type {tier_type} has no files on this host; remove this setting")
    if tier_type == "mooncake":
        if table.get("ttl") is not None:
            raise TableError("ttl: values in Mooncake have no time to live; Mooncake evicts; remove this setting")
        return read_mooncake_options(options)
    return read_s3_options(options) if tier_type == "s3" else read_valkey_options(options)


def read_valkey_options(options: Mapping[str, Any]) -> ValkeyOptions:
    given = read_table(options, VALKEY_OPTIONS, "options.")
    address: ValkeyAddress = read_address(given, "url", "valkey://HOST:6379", ValkeyAddress.parse)
    for one, other in (("username", "password_file"), ("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if one in given and other not in given:
            raise TableError(f"options.{one}: needs options.{other}")
    without = next((key for key in ("tls_ca", "tls_cert") if key in given and not address.tls), None)
    if without:
        raise TableError(f"options.{without}: needs TLS; use a url with valkeys://")
    return ValkeyOptions(**given)


def key_files_of(tiers: Sequence[TierConfig]) -> Iterator[tuple[str, Path]]:
    """Yields name and key file of each tier with encrypted values."""
    for tier in tiers:
        if tier.is_remote and (path := tier.options.get("encryption_keys")):
            yield tier.name, Path(path)
