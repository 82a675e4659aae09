"""Settings of an engine's connection to its kvtier server, common to all adapters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, get_args

from ...protos.credentials import Credentials
from ...protos.endpoint import client_endpoint
from ...protos.spelling import did_you_mean
from ..session.reconnect import TransportName

__all__ = ["ServerConfig", "check_number"]


@dataclass(frozen=True)
class ServerConfig:
    """Settings that all adapters have.

    `endpoint`: the server, `unix:PATH` or `host:port`. Default: `$KVTIER_ENDPOINT`, otherwise the
    default socket of this user.
    `transport`: `auto`, `shm`, `tcp` (gRPC if the server has TLS), `grpc` or `cuda_ipc`. With
    `auto` and `cuda_ipc` the server copies to and from a GPU. If the server cannot do this, the
    engine copies.
    `lookup_timeout_s`: a request whose lookup takes longer is computed without the cache.
    `tenant`: part of the namespace; engines of different tenants never share blocks.
    `weights_version`: name of the weights, if the engine gets other weights than those of the model
    files. Part of the namespace.
    `ca`, `cert`, `key`, `token_file`: paths of files, see `kvtier.client.Credentials`. Defaults:
    `$KVTIER_CA`, `$KVTIER_CERT` and so on. There is no `token`, because engines log these settings.
    """

    source: ClassVar[str] = "kv_connector_extra_config"

    endpoint: str | None = None
    transport: TransportName = "auto"
    lookup_timeout_s: float = 1.0
    tenant: str = ""
    weights_version: str = ""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    token_file: str | None = None

    @property
    def credentials(self) -> Credentials:
        return Credentials.from_environment(ca=self.ca, cert=self.cert, key=self.key, token_file=self.token_file)

    @classmethod
    def parse(cls, extra: Mapping[str, Any], warn: Callable[[str], None]) -> Self:
        """Parses `extra`. Raises ValueError for a wrong value, and warns of each unknown key."""
        known = [field.name for field in fields(cls)]
        for key in extra:
            if key not in known:
                hint = did_you_mean(key, known) or f"; known keys: {', '.join(known)}"
                warn(f"kvtier: unknown key {key!r} in {cls.source} is ignored{hint}")
        values = {key: extra[key] for key in known if key in extra}
        values.setdefault("endpoint", os.environ.get("KVTIER_ENDPOINT") or None)
        config = cls(**values)
        config.check()
        return config

    def check_connection(self) -> None:
        """Raises ValueError if the endpoint is invalid or needs other credentials.

        Does not connect.
        """
        try:
            self.credentials.channel(client_endpoint(self.endpoint), ()).close()
        except ValueError as error:
            raise ValueError(f"kvtier: {error}") from error

    def check(self) -> None:
        """Raises ValueError for an invalid value."""
        if self.endpoint is not None and not isinstance(self.endpoint, str):
            raise ValueError(f"kvtier: endpoint must be a string, not {self.endpoint!r}")
        if self.transport not in get_args(TransportName):
            raise ValueError(
                f"kvtier: transport must be one of {', '.join(get_args(TransportName))}, not {self.transport!r}"
            )
        for name in ("tenant", "weights_version"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"kvtier: {name} must be a string, not {value!r}")  # noqa: TRY004 - one kind for all
        for name in ("ca", "cert", "key", "token_file"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ValueError(f"kvtier: {name} must be the path of a file, not {value!r}")  # noqa: TRY004 - as above
        check_number("lookup_timeout_s", self.lookup_timeout_s, 0.0, 60.0)


def check_number(name: str, value: object, low: float, high: float, kind: type[int | float] = float) -> None:
    accepted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not low <= value <= high:
        noun = "an integer" if kind is int else "a number"
        raise ValueError(f"kvtier: {name} must be {noun} from {low:g} to {high:g}, not {value!r}")
