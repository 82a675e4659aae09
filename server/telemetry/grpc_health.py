"""gRPC health service (`grpc.health.v1`) of the server, its services and its tiers.

| service | is SERVING |
|---|---|
| `""`, and each `kvtier.v1.…Service` | while calls are served and the CPU tier has memory |
| `kvtier.tier.<name>`, also for `cpu` | while the tier has no error |

A broken secondary tier does not change the status of the server, because the server works without
this tier.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from ...tiers.stats.snapshots import ManagerStats

__all__ = ["Health", "tier_service"]

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def tier_service(name: str) -> str:
    return f"kvtier.tier.{name}"


class Health:
    """Health service of one server. Runs on the event loop.

    All services are NOT_SERVING before the first `update` and after `shut_down`.
    """

    def __init__(self, services: Sequence[str]) -> None:
        """`services` are full gRPC names."""
        self._services = ("", *services)
        self._servicer = HealthServicer()
        self._sent: dict[str, int] = {}

    async def register(self, server: grpc.aio.Server) -> None:
        for service in self._services:
            await self._set(service, _NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def update(self, stats: ManagerStats) -> None:
        """Publishes the current statuses, also to clients that watch a service."""
        # The server can serve calls before all bytes of the region have memory pages.
        works = stats.tiers[0].available_bytes > 0
        serving = dict.fromkeys(self._services, works) | {tier_service(tier.name): tier.healthy for tier in stats.tiers}
        for service, is_serving in serving.items():
            await self._set(service, _SERVING if is_serving else _NOT_SERVING)

    async def shut_down(self) -> None:
        """Reports NOT_SERVING permanently. Called before the server drains."""
        await self._servicer.enter_graceful_shutdown()

    async def _set(self, service: str, status: int) -> None:
        if self._sent.get(service) != status:
            await self._servicer.set(service, status)
            self._sent[service] = status
