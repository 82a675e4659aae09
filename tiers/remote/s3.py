"""Tier `s3`: packs of blocks in a bucket of S3, Google Cloud Storage or Azure.

Addresses of buckets, and connections to them with the library `obstore`.
"""

from __future__ import annotations

import configparser
import importlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Self

from ..secondary_tier import TierOpenError
from . import value_codec
from .bucket import Bucket, import_obstore
from .network_tier import RemoteLimits, split_url
from .object_store import StoreUnavailableError
from .pack_tier import PackTier
from .value_codec import ValueCodec

__all__ = ["BucketAddress", "BucketOptions", "S3Tier", "open_bucket"]

SCHEMES = ("s3", "gs", "az", "file")
CREDENTIAL_SECONDS = 300.0
"""A file with credentials of S3 is read again after this time."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", re.ASCII)
_PREFIX = re.compile(r"[\w.!*'()/-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """Address of a bucket: `s3://BUCKET/PREFIX`, `gs://…`, `az://ACCOUNT/CONTAINER/PREFIX`.

    `file:///DIRECTORY` is a directory, for tests.
    """

    scheme: str
    bucket: str
    """Bucket, for Azure ACCOUNT/CONTAINER, or directory."""
    prefix: str
    """Empty, or with a slash at its end."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parses a URL. Raises ValueError; the message never contains credentials."""
        refusal = "must contain neither credentials nor parameters; use `credentials_file` or the environment"
        parts = split_url(url, SCHEMES, refusal)
        if parts.scheme == "file":
            if parts.netloc or not parts.path.startswith("/"):
                raise ValueError("must be like file:///DIRECTORY")
            return cls("file", parts.path, "")
        path = parts.path.strip("/")
        bucket = parts.netloc
        if parts.scheme == "az":
            container, _, path = path.partition("/")
            bucket = f"{bucket}/{container}"
        if (
            not all(_BUCKET.fullmatch(name) for name in bucket.split("/"))
            or not _PREFIX.fullmatch(path)
            or "//" in path
        ):
            form = "az://ACCOUNT/CONTAINER/PREFIX" if parts.scheme == "az" else f"{parts.scheme}://BUCKET/PREFIX"
            raise ValueError(f"must be like {form}")
        return cls(parts.scheme, bucket, f"{path}/" if path else "")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """How to connect to an object store.

    Attributes:
        endpoint: URL of a store that is not the provider's own.
        region: of the bucket, S3 only.
        credentials_file: S3: a file like `~/.aws/credentials`, section `default`. Google: the JSON
            file of a service account. Azure: a file with the access key. Without a file, the
            environment has the credentials.
        tls_ca: certificates of the authorities that sign the store's certificate, besides those of
            the system.
    """

    endpoint: str | None = None
    region: str | None = None
    credentials_file: Path | None = None
    tls_ca: Path | None = None


class S3Tier(PackTier):
    type: ClassVar[str] = "s3"

    def __init__(
        self,
        name: str,
        size_bytes: int,
        *,
        url: str,
        limits: RemoteLimits,
        endpoint: str | None = None,
        region: str | None = None,
        credentials_file: Path | None = None,
        tls_ca: Path | None = None,
        pack: int = 16 << 20,
        directory: int = 64 << 20,
        codec: ValueCodec = value_codec,
    ) -> None:
        """Connects on first use. Raises `TierOpenError`: no library, or the URL is invalid."""
        try:
            address = BucketAddress.parse(url)
        except ValueError as error:
            raise TierOpenError(f"url: {error}") from None
        options = BucketOptions(endpoint=endpoint, region=region, credentials_file=credentials_file, tls_ca=tls_ca)
        bucket = open_bucket(address, options, limits.deadline_seconds)
        super().__init__(
            name,
            size_bytes,
            node=str(address),
            bucket=bucket,
            limits=limits,
            pack_bytes=pack,
            directory_bytes=directory,
            codec=codec,
        )


def open_bucket(address: BucketAddress, options: BucketOptions, deadline_seconds: float) -> Bucket:
    """Opens a bucket; connects on first use. Raises TierOpenError without the library."""
    import_obstore()
    stores = importlib.import_module("obstore.store")
    connect = {"s3": _connect_s3, "gs": _connect_gs, "az": _connect_az}

    def client(seconds: float) -> Any:
        if address.scheme == "file":
            return stores.LocalStore(address.bucket, mkdir=True)
        limit = timedelta(seconds=seconds)
        http: dict[str, Any] = {"timeout": limit, "connect_timeout": limit, "user_agent": "kvtier"}
        if options.endpoint and options.endpoint.startswith("http://"):
            http["allow_http"] = True
        if options.tls_ca:
            http["root_certificate"] = _read(options.tls_ca)
        # A retry would multiply the deadline. The tier has a circuit breaker.
        common = {"client_options": http, "retry_config": {"max_retries": 0}}
        return connect[address.scheme](stores, address.bucket, options, common)

    return Bucket(client, address.prefix, deadline_seconds)


def _connect_s3(stores: Any, bucket: str, options: BucketOptions, common: dict[str, Any]) -> Any:
    # TLS and the checksum of each block make a second checksum of the payload unnecessary.
    config: dict[str, Any] = {"unsigned_payload": True}
    if options.endpoint:
        config |= {"endpoint": options.endpoint, "region": "us-east-1", "virtual_hosted_style_request": False}
    if options.region:
        config["region"] = options.region
    file = options.credentials_file
    provider = (lambda: _s3_credentials(file)) if file else None
    return stores.S3Store(bucket, config=config, credential_provider=provider, **common)


def _connect_gs(stores: Any, bucket: str, options: BucketOptions, common: dict[str, Any]) -> Any:
    config = {"base_url": options.endpoint} if options.endpoint else {}
    if options.credentials_file:
        config["service_account"] = str(options.credentials_file)
    return stores.GCSStore(bucket, config=config, **common)


def _connect_az(stores: Any, bucket: str, options: BucketOptions, common: dict[str, Any]) -> Any:
    account, _, container = bucket.partition("/")
    config = {"account_name": account}
    if options.endpoint:
        config["endpoint"] = options.endpoint
    if options.credentials_file:
        config["account_key"] = _read(options.credentials_file).strip()
    return stores.AzureStore(container, config=config, **common)


def _s3_credentials(file: Path) -> dict[str, Any]:
    """Reads the section `default` of a file like `~/.aws/credentials`."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(_read(file), source=str(file))
    try:
        section = parser["default"]
        return {
            "access_key_id": section["aws_access_key_id"],
            "secret_access_key": section["aws_secret_access_key"],
            "token": section.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIAL_SECONDS),
        }
    except KeyError as error:
        raise StoreUnavailableError(f"{file} has no {error.args[0]}") from None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise StoreUnavailableError(f"cannot read {error.filename}: {error.strerror}") from error
