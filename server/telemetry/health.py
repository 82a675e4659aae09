"""What the gRPC health service (`grpc.health.v1`) says: about the server, its services and each of its tiers.

| service | is SERVING |
|---|---|
| `""`, and each `kvtier.v1.…Service` | while calls are served and the CPU tier has memory |
| `kvtier.tier.<name>`, `cpu` among them | while all is well with this tier |

A tier in trouble is no reason to restart a server that goes on without it, so it has a name of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from ...tiers.stats.snapshots import ManagerStats

__all__ = ["Health", "tier_service"]

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def tier_service(name: str) -> str:
    """Returns the name under which health speaks of a tier."""
    return f"kvtier.tier.{name}"


class Health:
    """Owns the health service of one server. Lives on the event loop.

    Nothing is SERVING before the first `update`, nor after `shut_down`.
    """

    def __init__(self, services: Sequence[str]) -> None:
        """`services` are the full names of those that the server offers."""
        self._services = ("", *services)
        self._servicer = HealthServicer()
        self._said: dict[str, int] = {}

    async def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that has not been started."""
        for service in self._services:
            await self._say(service, _NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def update(self, stats: ManagerStats) -> None:
        """Says how things are now. Called once the server serves, and then with every tick; wakes only watchers of a change."""
        for service, serving in self._statuses(stats):
            await self._say(service, _SERVING if serving else _NOT_SERVING)

    async def shut_down(self) -> None:
        """Says NOT_SERVING for good: a later `update` changes nothing. Called before the server drains."""
        await self._servicer.enter_graceful_shutdown()

    def _statuses(self, stats: ManagerStats) -> Iterator[tuple[str, bool]]:
        # A region that could be backed only in part serves with what there is.
        works = stats.tiers[0].available_bytes > 0
        for service in self._services:
            yield service, works
        for tier in stats.tiers:
            yield tier_service(tier.name), tier.healthy

    async def _say(self, service: str, status: int) -> None:
        if self._said.get(service) != status:
            await self._servicer.set(service, status)
            self._said[service] = status
