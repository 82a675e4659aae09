"""A refusal that no retry can change ends a wait for a session at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from harness.auth_site import Site, make_site
from harness.payloads import namespace_of
from harness.server_process import MIB, ServerProcess

from kvtier.client import (
    AccessDenied,
    ChecksumMismatch,
    Client,
    InvalidRequest,
    KVTierError,
    LimitExceeded,
    NotConnected,
    SessionLost,
    UnsupportedServer,
)
from kvtier.client.errors import error_from
from kvtier.client.part_streams import is_retryable
from kvtier.client.session import reconnect

NAMESPACE = namespace_of(4096)
LONG_SECONDS = 3600.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yields a server with TLS, tokens and a region of 16 MiB."""
    site = make_site(tmp_path_factory.mktemp("s"))
    with site.server.start():
        yield site


def refusal_of(client: Client) -> KVTierError:
    """Returns the error of a wait for an hour, which must end by itself."""
    errors: list[KVTierError] = []

    def wait() -> None:
        try:
            client.wait_until_connected(LONG_SECONDS)
        except KVTierError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive(), "the client waits although no retry can succeed"
    return errors[0]


def test_unknown_credentials_end_the_wait(site: Site) -> None:
    with contextlib.closing(site.client("old")) as client:
        error = refusal_of(client)

    assert (type(error), error.reason, error.permanent) == (AccessDenied, "UNAUTHENTICATED", True)


def test_another_tenant_ends_the_wait(site: Site) -> None:
    with contextlib.closing(site.client("acme-engine", tenant="zeta")) as client:
        assert refusal_of(client).reason == "WRONG_TENANT"


def test_another_protocol_version_ends_the_wait(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "PROTOCOL_VERSION", 99)
    with contextlib.closing(site.client("acme-engine")) as client:
        error = refusal_of(client)

    assert error.reason == "UNSUPPORTED_VERSION"
    assert "supports protocol version 2, not 99" in str(error)


def test_a_part_that_is_too_large_ends_the_wait(site: Site) -> None:
    """The error names the limit of this server and the setting that the limit depends on."""
    with contextlib.closing(
        Client(site.server.tcp, namespace=namespace_of(MIB), credentials=site.credentials("any-engine"))
    ) as client:
        error = refusal_of(client)

    assert (type(error), error.reason) == (InvalidRequest, "INVALID_NAMESPACE")
    assert "a part of 1048576 bytes (one rank of a block) is too large" in str(error)
    assert "with region_size 16777216 the limit is 524288 bytes" in str(error)


def test_a_server_that_is_not_kvtier_ends_the_wait(tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(f"unix:{tmp_path}/other")
    server.start()
    try:
        with contextlib.closing(Client(f"unix:{tmp_path}/other", namespace=NAMESPACE)) as client:
            assert isinstance(refusal_of(client), UnsupportedServer)
    finally:
        server.stop(0).wait()


def test_the_wait_goes_on_after_a_refusal_that_can_end(tmp_path: Path) -> None:
    """A server with too many sessions accepts the client when another client has closed."""
    with ServerProcess(tmp_path, config="[limits]\nmax_sessions = 1").start() as server:
        first = Client(server.endpoint, namespace=NAMESPACE)
        first.wait_until_connected(60)
        with Client(server.endpoint, namespace=NAMESPACE) as second:
            with pytest.raises(LimitExceeded) as refused:
                second.wait_until_connected(5)  # long enough for an answer of a busy machine
            first.close()
            second.wait_until_connected(60)
    assert not refused.value.permanent


def test_a_refusal_by_a_proxy_stays_marked_as_temporary(tmp_path: Path) -> None:
    """The error of a wait has the mark of the refusal, not the default of its class."""

    class Proxy(grpc.GenericRpcHandler):
        def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(self.refuse)

        @staticmethod
        def refuse(_: bytes, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "from a proxy")

    server = grpc.server(ThreadPoolExecutor(1), handlers=(Proxy(),))
    server.add_insecure_port(f"unix:{tmp_path}/proxy")
    server.start()
    try:
        with (
            contextlib.closing(Client(f"unix:{tmp_path}/proxy", namespace=NAMESPACE)) as client,
            pytest.raises(AccessDenied, match="from a proxy") as refused,
        ):
            client.wait_until_connected(2)
    finally:
        server.stop(0).wait()
    assert not refused.value.permanent


@pytest.mark.parametrize(
    ("code", "permanent"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, True),
        (grpc.StatusCode.INVALID_ARGUMENT, False),
        (grpc.StatusCode.UNAUTHENTICATED, False),
        (grpc.StatusCode.PERMISSION_DENIED, False),
        (grpc.StatusCode.UNAVAILABLE, False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, False),
        (grpc.StatusCode.INTERNAL, False),
    ],
)
def test_a_status_without_a_reason_is_classified(code: grpc.StatusCode, *, permanent: bool) -> None:
    """Proxies and other servers give no reason."""
    assert error_from(code, "from a proxy", None).permanent is permanent


def test_a_proxy_without_its_server_is_no_permanent_refusal() -> None:
    """A proxy answers with the HTTP status 404, which gRPC turns into UNIMPLEMENTED."""
    details = "Received http2 header with status: 404"
    assert not error_from(grpc.StatusCode.UNIMPLEMENTED, details, None).permanent


RETRIES: dict[str, tuple[Callable[[], KVTierError], bool]] = {
    "no connection": (lambda: NotConnected("x"), True),
    "damaged": (lambda: ChecksumMismatch("x"), True),
    "broken stream": (lambda: SessionLost("x"), True),
    "full": (lambda: LimitExceeded("x", "LIMIT_EXCEEDED"), True),
    "rate limit": (lambda: LimitExceeded("x", "RATE_LIMITED"), False),
    "message too large": (lambda: error_from(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large", None), False),
    "ended session": (lambda: SessionLost("x", "UNKNOWN_SESSION"), False),
    "wrong size": (lambda: InvalidRequest("x", "WRONG_SIZE"), False),
}


@pytest.mark.parametrize("name", RETRIES)
def test_only_streams_that_can_succeed_are_retried(name: str) -> None:
    class Open:
        ended = False

    make, expected = RETRIES[name]
    assert is_retryable(make(), Open()) is expected  # type: ignore[arg-type]
