"""Sources that calls name: permits, searches and registers the blocks that a source has.

`PeerSources.locate` runs before a lookup. It tells the core which missing blocks the tier `peers`
can load, and the lookup then promotes these blocks like those of any other tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from ...client.errors import KVTierError, LimitExceeded
from ...protos.credentials import Credentials, CredentialsError
from ...protos.endpoint import Endpoint
from ...protos.peer_directory import PeerDirectory
from ...protos.v1 import cache_pb2, common_pb2
from ...tiers.errors import CoreError
from ...tiers.remote.circuit_breaker import CircuitBreaker
from ...tiers.secondary_tier import TierFilter
from ...tiers.types import EngineSession, tenant_of
from ..config.peers import PeersConfig
from ..core_runtime import TierRuntime
from ..refused import Refused
from ..rpc.slice_scheduler import SliceScheduler, slices_of
from ..telemetry.logs import get_logger
from .link import PeerLink
from .peer_tier import PeerTier

__all__ = ["Located", "PeerSources", "peer_credentials"]

_log = get_logger(__name__)

_SLICE = 512
_MAX_BLOCKS = 4096
"""Limit of the blocks of one search: 5 µs each in one piece. The next lookup gets further ones."""
_SWEEP_SECONDS = 10.0
_MAX_LINKS = 256
"""Limit of the connections for searches. Only callers without a token can invent more tenants."""

_Place = tuple[Endpoint, bytes]
"""Another server, and the tag of the tenant that searches there.

Each tenant has a connection and a circuit breaker of its own. Otherwise one tenant could take all
streams of the connection, or make the server unreachable for others by searches that take too long.
"""

_NONE = cache_pb2.SOURCE_OUTCOME_UNSPECIFIED
_FOUND = cache_pb2.SOURCE_OUTCOME_FOUND
_ABSENT = cache_pb2.SOURCE_OUTCOME_ABSENT
_NOT_NEEDED = cache_pb2.SOURCE_OUTCOME_NOT_NEEDED
_NOT_LISTED = cache_pb2.SOURCE_OUTCOME_NOT_LISTED
_UNREACHABLE = cache_pb2.SOURCE_OUTCOME_UNREACHABLE
_REFUSED = cache_pb2.SOURCE_OUTCOME_REFUSED
_BUSY = cache_pb2.SOURCE_OUTCOME_BUSY


@dataclass(frozen=True, slots=True)
class Located:
    """Result of a search: its outcome, and the keys of the blocks that the source has."""

    outcome: cache_pb2.SourceOutcome = _NONE
    keys: Sequence[bytes] = ()


def peer_credentials(config: PeersConfig, *, insecure: bool) -> Credentials:
    """Returns this server's credentials at other servers."""
    paths = {
        name: None if (path := getattr(config, name)) is None else str(path)
        for name in ("ca", "cert", "key", "token_file")
    }
    return Credentials(**paths, insecure=insecure)


class PeerSources:
    """Searches of all calls. Every method runs on the event loop."""

    def __init__(
        self,
        tier: PeerTier | None,
        runtime: TierRuntime,
        directory: PeerDirectory,
        credentials: Credentials,
        deadline_seconds: float,
        *,
        scheduler: SliceScheduler,
        description_of: Callable[[EngineSession], common_pb2.Namespace],
        observe: Callable[[str], object] = lambda _: None,
    ) -> None:
        """`tier` is the runtime's tier `peers`; None if no source is permitted.

        `description_of` returns the namespace of a session. `observe` gets each outcome.
        """
        self._tier = tier
        self._runtime = runtime
        self._core = runtime.core
        self._number = next(
            (n for n, found in enumerate(runtime.tiers, start=1) if tier and found.name == tier.name), 0
        )
        self._directory = directory
        self._credentials = credentials
        self._deadline_seconds = deadline_seconds
        self._scheduler = scheduler
        self._description_of = description_of
        self._observe = observe
        self._engine_id = f"kvtier-server-{secrets.token_hex(8)}"
        self._links: dict[_Place, PeerLink] = {}
        """Least recently used first."""
        self._breakers: dict[_Place, CircuitBreaker] = defaultdict(CircuitBreaker)
        self._searches: Counter[_Place] = Counter()
        """Numbers of running searches."""

    async def locate(
        self,
        session: EngineSession,
        source: str,
        keys: Sequence[bytes],
        tiers: TierFilter,
        deadline: float,
        *,
        prefix: bool,
    ) -> Located:
        """Searches `source` for the blocks that this server lacks. Never raises a failure of it.

        The caller begins its lookup at once, and then calls `withdraw`.
        """
        if not source or (self._number and self._number in self._core.excluded(tiers)):
            return Located()
        # A call over a socket runs outside of a task until it first waits. Time-outs need a task.
        located = await asyncio.get_running_loop().create_task(
            self._metered(session, self._locate(session, source, keys, tiers, deadline, prefix=prefix))
        )
        self._observe(cache_pb2.SourceOutcome.Name(located.outcome).removeprefix("SOURCE_OUTCOME_").lower())
        return located

    def withdraw(self, session: EngineSession, located: Located) -> None:
        """Gives up located blocks that the lookup did not begin to load."""
        if located.keys and self._tier is not None:
            unused = self._core.withdraw(self._number, session, located.keys)
            self._tier.abandon((session.namespace.id, key) for key in unused)

    async def sweep(self) -> None:
        """Ends idle sessions and connections, until the task is cancelled.

        It also removes circuit breakers that are not needed, and those of addresses that no entry
        of the directory has.
        """
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = asyncio.get_running_loop().time()
            for place, link in list(self._links.items()):
                if link.end_idle_sessions(now) and not self._searches[place]:
                    await self._drop(place)
            self._searches = +self._searches
            for place in self._breakers.keys() - self._searches.keys():
                address, _ = place
                found = self._directory.find(str(address))
                # Its `tls_name` may differ, because several listed names may have this address.
                is_listed = found is not None and (found.host, found.port) == (address.host, address.port)
                if not is_listed or self._breakers[place].is_idle:
                    del self._breakers[place]
                    self._runtime.downgrades.end("peers", str(address))

    async def close(self) -> None:
        self._directory.close()
        for place in list(self._links):
            await self._drop(place)

    async def _metered(self, session: EngineSession, search: Coroutine[Any, Any, Located]) -> Located:
        """Charges a search to its session, because a task of its own is not measured otherwise."""
        account = self._scheduler.account_of(session.id)
        return await (search if account is None else self._scheduler.metered(account, search))

    async def _locate(
        self,
        session: EngineSession,
        source: str,
        keys: Sequence[bytes],
        tiers: TierFilter,
        deadline: float,
        *,
        prefix: bool,
    ) -> Located:
        address = self._directory.find(source) if self._tier is not None else None
        if address is None:
            return Located(_NOT_LISTED)
        seconds = min(deadline - self._runtime.now(), self._deadline_seconds)
        if seconds <= 0:
            return Located(_UNREACHABLE)
        until = asyncio.get_running_loop().time() + seconds
        place = address, tenant_of(session.namespace.id)
        self._searches[place] += 1
        try:
            async with asyncio.timeout_at(until):
                return await self._search(session, place, keys, tiers, until, prefix=prefix)
        except (Refused, CoreError):  # the session has ended, or the arguments are wrong
            raise
        except asyncio.CancelledError:
            self._breakers[place].undecided()
            raise
        except Exception as error:  # noqa: BLE001 - the lookup of the call must not fail
            if seconds < self._deadline_seconds and asyncio.get_running_loop().time() >= until:
                # The limit of the caller: it must not make the source unreachable for other calls.
                self._breakers[place].undecided()
                return Located(_UNREACHABLE)
            return Located(self._failed(place, error))
        finally:
            self._searches[place] -= 1

    def _failed(self, place: _Place, error: Exception) -> cache_pb2.SourceOutcome:
        """Records the failure of a search, and returns its outcome."""
        server = str(place[0])
        if isinstance(error, KVTierError) and error.reason:
            self._breakers[place].succeeded()
            _log.warning("no blocks from another server", server=server, reason=f"{error}")
            return _REFUSED
        self._breakers[place].failed(f"{error}")
        cause = f"blocks of the server {server} are not loaded: {str(error) or 'no answer in time'}"
        remedy = "check that this server runs, and peers.servers, TLS and firewalls; docs/peers.md"
        self._runtime.downgrades.report("peers", cause, remedy, subject=server, is_logged=False)
        if isinstance(error, KVTierError | TimeoutError | CredentialsError):
            _log.warning("no blocks from another server", server=server, reason=f"{error}" or "no answer in time")
        else:
            _log.error("search at another server failed", server=server, exc_info=error)
        return _UNREACHABLE

    async def _search(
        self,
        session: EngineSession,
        place: _Place,
        keys: Sequence[bytes],
        tiers: TierFilter,
        until: float,
        *,
        prefix: bool,
    ) -> Located:
        lacking: list[bytes] = []
        for part in slices_of(keys, _SLICE):
            if len(part) < len(keys):
                await self._scheduler.turn(session)
            lacking += self._lacking(session, part, tiers)
            if len(lacking) >= _MAX_BLOCKS:
                break
        if not lacking:
            return Located(_NOT_NEEDED)
        lacking = lacking[:_MAX_BLOCKS]
        wanted = self._affordable(session, list(dict.fromkeys(lacking)))
        if not wanted:
            return Located(_BUSY)
        if not self._breakers[place].permits():
            return Located(_UNREACHABLE)
        link = await self._link_to(place)
        lease = await link.search(
            session.namespace.id,
            self._description_of(session),
            wanted,
            prefix=prefix,
            until=until,
        )
        self._breakers[place].succeeded()
        self._runtime.downgrades.end("peers", str(place[0]))
        if lease is None:
            return Located(_ABSENT)
        # Searches at the same time may have located the same blocks, or others.
        lacking = self._lacking(session, list(lease.items), tiers)
        found = self._affordable(session, lacking)
        if not found:
            lease.link.release(lease)
            return Located(_BUSY if lacking else _NOT_NEEDED)
        lease.items = {key: lease.items[key] for key in found}
        assert self._tier is not None
        self._tier.locate(lease, session.namespace.id, lambda key: _bytes_of(session, key), self._breakers[place])
        self._core.locate(self._number, session, found, self._runtime.now())
        return Located(_FOUND, found)

    def _lacking(self, session: EngineSession, keys: Sequence[bytes], tiers: TierFilter) -> list[bytes]:
        lacking = self._core.lacking(session, keys, tiers)
        self._runtime.run_commands()  # queries to shared tiers
        return lacking

    def _affordable(self, session: EngineSession, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Returns the first keys whose blocks may be in flight, besides those that are already."""
        assert self._tier is not None
        return keys[: self._tier.affordable(session.namespace.id, (_bytes_of(session, key) for key in keys))]

    async def _link_to(self, place: _Place) -> PeerLink:
        """Returns the link of a tenant to a server. Raises `KVTierError` if too many are in use."""
        if place not in self._links and len(self._links) >= _MAX_LINKS:
            idle = next((each for each in self._links if not self._searches[each]), None)
            if idle is None:
                raise LimitExceeded(f"{_MAX_LINKS} connections to other servers are in use", "LIMIT_EXCEEDED")
            await self._drop(idle)
        link = self._links.pop(place, None) or PeerLink(place[0], self._credentials, self._engine_id)
        self._links[place] = link
        return link

    async def _drop(self, place: _Place) -> None:
        link = self._links.pop(place)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await link.close()


def _bytes_of(session: EngineSession, key: bytes) -> int:
    return session.namespace.part_bytes_of(key) * session.namespace.world_size
