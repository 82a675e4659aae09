"""`kvtier remote`: deletes old objects from the bucket of a tier of type `s3`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice

from ...tiers.remote.bucket import Bucket, InvalidNameError, StoredObject
from ...tiers.remote.network_tier import RemoteLimits
from ...tiers.remote.pack_format import FORMATS, ROOT, format_folder, format_of
from ...tiers.remote.s3 import BucketAddress, BucketOptions, open_bucket
from ...tiers.secondary_tier import TierError
from ..config.s3 import read_s3_options
from ..config.schema import ConfigError, TierConfig
from ..config.units import human_size, parse_duration
from .config import load
from .console import EXIT_CONFIG, EXIT_FAILURE, EXIT_USAGE, print_line, refuse

__all__ = ["run"]

_DEADLINE_SECONDS = 10.0
_AT_ONCE = 1000
"""Objects that are deleted, and then printed, at once."""


def run(options: argparse.Namespace) -> int:
    try:
        tiers = load(options).config.tiers
        tier = _tier(tiers, options.tier)
        age_seconds = _age(options.older_than, tier)
    except ConfigError as error:
        return refuse(error.problems, EXIT_CONFIG)
    except ValueError as error:
        return refuse([f"{error}"], EXIT_USAGE)
    deleted: list[StoredObject] = []
    report = deleted.append if options.json else lambda found: print_line(_line(found, dry_run=options.dry_run))
    problem = ""
    count = nbytes = 0
    try:
        bucket = _bucket(tier)
        objects = _old_formats(bucket) if options.old_formats else _expired(bucket, age_seconds)
        for found in _delete(bucket, objects, dry_run=options.dry_run):
            report(found)
            count, nbytes = count + 1, nbytes + found.nbytes
    except TierError as error:
        problem = f"tier {tier.name}: {error}"
    except KeyboardInterrupt:
        problem = "interrupted; the objects listed were deleted"
    if options.json:
        objects_json = [
            {"path": each.path, "bytes": each.nbytes, "stored": f"{each.stored_at:%FT%TZ}"} for each in deleted
        ]
        print_line(json.dumps({"dry_run": options.dry_run, "objects": objects_json, "bytes": nbytes}, indent=2))
    else:
        print_line(f"{'would delete' if options.dry_run else 'deleted'} {count:,} objects, {human_size(nbytes)}")
    return refuse([problem], EXIT_FAILURE) if problem else 0


def _tier(tiers: Sequence[TierConfig], name: str | None) -> TierConfig:
    """Returns the tier of type `s3` with this name, or the only one. Raises ValueError."""
    found = [tier for tier in tiers if tier.type == "s3" and name in (None, tier.name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"give --tier: the tiers of type s3 are {', '.join(tier.name for tier in found)}")
    of_name = f" with the name {name!r}" if name else ""
    raise ValueError(f"the configuration has no tier of type s3{of_name}; other stores delete old blocks themselves")


def _age(text: str | None, tier: TierConfig) -> float:
    """Returns the age of the objects to delete in seconds. Raises ValueError."""
    if text is None:
        return tier.ttl if tier.ttl is not None else RemoteLimits().ttl_seconds
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise ValueError(f"--older-than {text}: {error}") from None
    if not seconds > 0:
        raise ValueError(f"--older-than {text}: must be more than 0")
    return seconds


def _bucket(tier: TierConfig) -> Bucket:
    options = read_s3_options(tier.options)
    how = BucketOptions(
        endpoint=options.endpoint,
        region=options.region,
        credentials_file=options.credentials_file,
        tls_ca=options.tls_ca,
    )
    return open_bucket(BucketAddress.parse(options.url), how, max(_DEADLINE_SECONDS, options.deadline))


def _expired(bucket: Bucket, age_seconds: float) -> Iterator[StoredObject]:
    """Yields the objects of current formats that are older, by the store's time of the write."""
    until = datetime.now(UTC) - timedelta(seconds=age_seconds)
    found = _objects(bucket, map(format_folder, FORMATS))
    yield from (each for each in found if each.stored_at < until)


def _old_formats(bucket: Bucket) -> Iterator[StoredObject]:
    """Yields the objects of earlier formats. Those of later ones belong to newer servers."""
    folders = (f"{ROOT}{folder}/" for folder in bucket.folders(ROOT))
    oldest = min(FORMATS)
    yield from _objects(
        bucket, (each for each in folders if (number := format_of(each)) is not None and number < oldest)
    )


def _objects(bucket: Bucket, folders: Iterable[str]) -> Iterator[StoredObject]:
    """Yields the objects of folders. Raises InvalidNameError after the last one."""
    refused: InvalidNameError | None = None
    for folder in folders:
        try:
            yield from bucket.objects(folder)
        except InvalidNameError as error:
            refused = error
    if refused is not None:
        raise refused


def _delete(bucket: Bucket, objects: Iterable[StoredObject], *, dry_run: bool) -> Iterator[StoredObject]:
    """Deletes objects and yields them. Then raises the error that has ended them."""
    remaining, error = iter(objects), None
    while error is None:
        some: list[StoredObject] = []
        try:
            some.extend(islice(remaining, _AT_ONCE))
        except TierError as failure:
            error = failure
        if not some:
            break
        if not dry_run:
            bucket.delete([found.path for found in some])
        yield from some
    if error is not None:
        raise error


def _line(found: StoredObject, *, dry_run: bool) -> str:
    what = "would delete" if dry_run else "deleted"
    return f"{what} {found.path} ({human_size(found.nbytes)}, stored {found.stored_at:%F %T} UTC)"
