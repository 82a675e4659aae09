"""Pulls of block parts from another server, by the client's streams (`docs/wire.md`)."""

from __future__ import annotations

from collections.abc import Sequence

from ...client.effects import Pull
from ...client.errors import ChecksumMismatch, KVTierError, ServerError
from ...client.part_streams import PartReceiver
from ...client.session.session import ClientSession
from ...client.session.socket_calls import SocketTarget
from ...client.transport.socket_streams import SocketStreams
from ...protos.buffers import address_of
from ...protos.credentials import Credentials
from ...protos.v1 import common_pb2, session_pb2, transfer_pb2
from ...tiers.secondary_tier import Outcome

__all__ = ["PeerStreams", "outcome_of"]

_STALL_SECONDS = 1.0
"""Maximum time without a byte."""


class _OrderedReceiver(PartReceiver):
    """Destination of a stream whose frames must arrive in order, and each byte once.

    Otherwise a hostile server could send the same bytes until the deadline, and each frame would
    take memory.
    """

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        super().__init__(addresses, sizes)
        self._received = 0

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        if offset != self._received or not 0 < nbytes <= self._parts.total_bytes - offset:
            raise ChecksumMismatch("the server sent other bytes than those of the requested parts")
        return super().views(offset, nbytes)

    def _record(self, offset: int, nbytes: int) -> None:
        self._received = offset + nbytes

    def check_complete(self) -> None:
        """Raises `ChecksumMismatch` if bytes are missing at the end of the stream."""
        if self._received != self._parts.total_bytes:
            raise ChecksumMismatch(f"the server sent {self._received} of {self._parts.total_bytes} bytes")


class PeerStreams:
    """Streams of one session at another server. Any thread may use them."""

    def __init__(
        self, address: tuple[str, int], ref: common_pb2.SessionRef, credentials: Credentials, tls_name: str
    ) -> None:
        """`tls_name`: name that the server's certificate must have; "" without TLS."""
        capabilities = session_pb2.CapabilitiesResponse()
        self.session = ClientSession(ref, capabilities, None, "another server")
        self._streams = SocketStreams(SocketTarget(address, ref, credentials, tls_name), _STALL_SECONDS)

    def pull(self, lease_id: int, items: Sequence[int], parts: Sequence[memoryview], seconds: float) -> Sequence[int]:
        """Fills `parts` with the parts of these items of a lease, in this order.

        Returns the digests of the parts; 0 for a part without one.
        Raises `KVTierError`; the content of the parts is then undefined.
        """
        addresses = [address_of(part, writable=True) for part in parts]
        sink = _OrderedReceiver(addresses, [part.nbytes for part in parts])
        request = transfer_pb2.PullRequest(session=self.session.ref, lease_id=lease_id, items=items)
        self._streams.pull(Pull(self.session, request, sink, seconds))
        sink.check_complete()
        return sink.digests

    def close(self) -> None:
        """Ends all pulls."""
        self.session.end()
        self._streams.close()


def outcome_of(error: KVTierError) -> Outcome:
    """Returns the outcome of blocks whose pull has failed."""
    if error.reason:  # the other server has answered, and refused the call
        return Outcome.MISSING
    return Outcome.CORRUPT if isinstance(error, ChecksumMismatch | ServerError) else Outcome.FAILED
