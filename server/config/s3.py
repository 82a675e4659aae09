"""Settings of tiers in object stores: the table `options` of a tier of type `s3`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from ...tiers.remote.s3 import BucketAddress
from .annotations import InFlight, KeyFilePath, _duration, _setting, _size
from .fields import TableError, read_address, read_table, settings_of
from .units import MIB

__all__ = ["S3_OPTIONS", "S3Options", "read_s3_options"]


class S3Options(msgspec.Struct, frozen=True, kw_only=True):
    """Bucket of an `s3` tier: `[tiers.options]` in the file."""

    url: Annotated[
        str,
        _setting(
            "Bucket: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` (Google) or `az://ACCOUNT/CONTAINER/PREFIX` (Azure). The "
            "prefix is optional. `file:///DIRECTORY` is for tests."
        ),
    ]
    endpoint: Annotated[
        str | None,
        _setting("URL of a store that is not the provider's own; buckets are in the path.", default="the provider's"),
    ] = None
    region: Annotated[str | None, _setting("Region of the bucket, only `s3://`.", default="AWS_REGION")] = None
    credentials_file: Annotated[
        Path | None,
        _setting(
            "File with credentials. `s3://`: section `default` of a file like `~/.aws/credentials`, read again every 5 "
            "minutes. `gs://`: JSON of a service account. `az://`: the access key.",
            default="the environment, like AWS_ACCESS_KEY_ID, or the role of the machine",
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        _setting("Certificates of further authorities that sign the store's certificate (PEM).", default="none"),
    ] = None
    encryption_keys: KeyFilePath = None
    pack: Annotated[
        int, _size("Maximum size of the blocks in one object. A larger block has an object of its own.", MIB, 64 * MIB)
    ] = 16 * MIB
    directory: Annotated[
        int,
        _size(
            "Maximum memory of the server's list of blocks in the store: about 140 bytes for each block. If it is full, the "
            "server forgets the oldest objects.",
            MIB,
        ),
    ] = 64 * MIB
    deadline: Annotated[
        float,
        _duration(
            "Maximum time of one call of the store, plus a second for each 16 MiB. After it, the blocks are misses.",
            0.05,
            30,
        ),
    ] = 1.0
    in_flight: InFlight = 64 * MIB


S3_OPTIONS = settings_of(S3Options)


def read_s3_options(table: Mapping[str, Any]) -> S3Options:
    """Returns the checked options of a tier. Raises `TableError`."""
    given = read_table(table, S3_OPTIONS, "options.")
    address: BucketAddress = read_address(given, "url", "s3://BUCKET/PREFIX", BucketAddress.parse)
    if "endpoint" in given:
        endpoint: SplitResult = read_address(given, "endpoint", "", urlsplit)
        if endpoint.scheme not in ("http", "https") or not endpoint.hostname or "@" in endpoint.netloc:
            raise TableError("options.endpoint: must be like https://HOST:PORT, without credentials")
    if "region" in given and address.scheme != "s3":
        raise TableError("options.region: only for s3://")
    return S3Options(**given)
