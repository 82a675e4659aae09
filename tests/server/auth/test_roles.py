"""Tokens, tenants and roles: what each caller may do, on every socket."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest
import xxhash
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from harness.auth_site import (
    KEYS,
    PART,
    Site,
    connected,
    error_of,
    make_site,
    ready_line,
    refusal_error,
    status_of,
)
from harness.bulk import push_call, tls_route, wait_for_bulk
from harness.command_line import kvtier
from harness.launch import launch
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.raw import RawSession, attach_reply, refusal_of

from kvtier.client import AccessDenied, Client, Credentials, SessionLost
from kvtier.client.session import reconnect
from kvtier.client.session.session import AttachError, Attachment
from kvtier.client.session.socket_calls import SocketCalls, SocketTarget
from kvtier.client.transport.grpc_methods import CHANNEL_OPTIONS, PULL, PUSH
from kvtier.protos import v1
from kvtier.protos.endpoint import parse_endpoint
from kvtier.protos.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    common_pb2,
    session_pb2,
    session_pb2_grpc,
    transfer_pb2,
)
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import Purpose
from kvtier.server.auth.roles import OWNER, RPC_ROLES, Role, require_role
from kvtier.server.refused import Refused

WRONG_TENANT = ("PERMISSION_DENIED", "WRONG_TENANT")
NOT_FOR_YOU = ("PERMISSION_DENIED", "PERMISSION_DENIED")
MODULES = [importlib.import_module(f"{v1.__name__}.{file.name}") for file in pkgutil.iter_modules(v1.__path__)]
SERVICES = [
    service
    for module in [*MODULES, health_pb2, reflection_pb2]
    if hasattr(module, "DESCRIPTOR")
    for service in module.DESCRIPTOR.services_by_name.values()
]


def raw(site: Site, name: str, **more: Any) -> RawSession:
    """Opens a session over TLS with the named token."""
    namespace = namespace_of(PART, tenant=more.pop("tenant", ""))
    return RawSession(site.server.tcp, namespace, engine_id="e", rank=0, credentials=site.credentials(name), **more)


def refused(call: Callable[[], object]) -> tuple[str, str | None]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return refusal_of(error.value)


def test_every_rpc_has_its_roles() -> None:
    """The role table lists every RPC and nothing else."""
    methods = {f"{service.full_name}/{method.name}" for service in SERVICES for method in service.methods}
    assert len(SERVICES) >= 7
    assert set(RPC_ROLES) == methods


def test_only_probes_need_no_credentials() -> None:
    """A method that is not in the table is refused."""
    assert [method for method, roles in RPC_ROLES.items() if roles is None] == ["grpc.health.v1.Health/Check"]
    with pytest.raises(Refused):
        require_role("kvtier.v1.AdminService/Unheard", OWNER)


class TestWithoutCredentials:
    """Calls without a valid token or certificate."""

    def test_every_rpc_is_refused(self, site: Site) -> None:
        """The status is UNAUTHENTICATED, without a token or with an unknown one.

        The health check works.
        """
        for token in (None, "kvt_" + "x" * 43, "x"):
            credentials = Credentials(ca=site.authority.ca, token=token)
            with connected(credentials.channel(parse_endpoint(site.server.tcp), CHANNEL_OPTIONS)) as channel:
                for method, roles in RPC_ROLES.items():
                    call = channel.unary_unary(f"/{method}", None, None)
                    if roles is None:
                        assert health_pb2.HealthCheckResponse.FromString(call(b"", timeout=60)).status == 1
                    else:
                        assert refused(lambda call=call: call(b"", timeout=60))[0] == "UNAUTHENTICATED", method  # type: ignore[misc]

    def test_the_client_raises_access_denied(self, site: Site) -> None:
        """An expired token has the same effect."""
        for name in (None, "old"):
            with site.client(name) as client:
                error = refusal_error(client)
                assert isinstance(error, AccessDenied)
                assert error.reason == "UNAUTHENTICATED"

    def test_malformed_authorization_headers_are_refused(self, site: Site) -> None:
        """Another scheme, an empty header, and a header of a kilobyte."""
        with connected(Credentials(ca=site.authority.ca).channel(parse_endpoint(site.server.tcp))) as channel:
            stub = session_pb2_grpc.SessionServiceStub(channel)
            for value in ("Basic abc", "Bearer", "Bearer ", site.tokens.token["acme-far"], "Bearer " + "x" * 1000):
                metadata = [("authorization", value)]
                answer = refused(lambda m=metadata: stub.Capabilities(session_pb2.CapabilitiesRequest(), metadata=m))  # type: ignore[misc]
                assert answer == ("UNAUTHENTICATED", "UNAUTHENTICATED"), value


class TestTenants:
    """Isolation of the blocks of different tenants."""

    def test_the_tenant_comes_from_the_credentials(self, site: Site) -> None:
        """A client without `tenant` gets that of its token.

        It finds no other tenant's blocks and may not name another tenant.
        """
        with site.client("acme-far") as acme, site.client("zeta-engine") as zeta:
            acme.store(KEYS, [payload(key, PART) for key in KEYS])
            assert_serves(acme, KEYS)
            with zeta.lookup(KEYS) as lease:
                assert lease.prefix_hits == 0
            with site.client("acme-engine", tenant="acme") as same:
                assert_serves(same, KEYS)
            with site.client("any-engine", tenant="acme") as any_engine:
                assert_serves(any_engine, KEYS)
            with site.client("zeta-engine", tenant="acme") as thief:
                error = refusal_error(thief)
                assert isinstance(error, AccessDenied)
                assert error.reason == "WRONG_TENANT"

    def test_another_tenants_ids_are_refused(self, site: Site) -> None:
        """Sessions, leases and stores of another tenant give no access on any socket."""
        with raw(site, "acme-engine") as acme, raw(site, "zeta-engine") as zeta:
            preparing = cache_pb2.PrepareStoreRequest(session=acme.ref, keys=pack_keys([key_of(77)]))
            store = acme.cache.PrepareStore(preparing, timeout=60)
            stolen = cache_pb2.CompleteStoreRequest(session=acme.ref, store_id=store.store_id)
            assert refused(lambda: zeta.cache.CompleteStore(stolen, timeout=60)) == (
                "UNAUTHENTICATED",
                "UNKNOWN_SESSION",
            )
            guessed = cache_pb2.CompleteStoreRequest(session=zeta.ref, store_id=store.store_id)
            assert refused(lambda: zeta.cache.CompleteStore(guessed, timeout=60)) == ("NOT_FOUND", "STORE_NOT_FOUND")
            for ref, reason in ((acme.ref, "UNKNOWN_SESSION"), (zeta.ref, "STORE_NOT_FOUND")):
                frame = transfer_pb2.PushRequest(session=ref, store_id=store.store_id)
                assert refused(lambda f=frame: zeta.push(iter([f.SerializeToString()]), timeout=60))[1] == reason  # type: ignore[misc]
                with tls_route(site, "zeta-engine").dial(acme, Purpose.STREAMS, ref) as stream:
                    if ref is zeta.ref:
                        assert stream.answer() == (0, b"")
                        stream.send(push_call(store.store_id))
                    assert stream.refusal()[1] == reason
            made_up = common_pb2.SessionRef(session_id=b"\0" * 16, epoch=acme.ref.epoch)
            lookup = cache_pb2.LookupRequest(session=made_up, keys=pack_keys(KEYS))
            assert refused(lambda: zeta.cache.Lookup(lookup, timeout=60)) == ("UNAUTHENTICATED", "UNKNOWN_SESSION")

    def test_a_local_call_connection_belongs_to_its_session(self, site: Site) -> None:
        """It carries no calls of another tenant's session."""
        with site.client("zeta-engine", unix=True, transport="shm") as zeta, raw(site, "acme-engine") as acme:
            zeta.wait_until_connected(60)
            session = zeta._transport.session
            request = cache_pb2.LookupRequest(session=acme.ref, keys=pack_keys(KEYS))
            with pytest.raises(SessionLost) as lost:
                session.calls.call("CacheService/Lookup", request.SerializeToString(), 60.0)
            assert lost.value.reason == "UNKNOWN_SESSION"
            with pytest.raises(AccessDenied) as error:
                session.calls.call("AdminService/GetStatus", b"", 60.0)
            assert error.value.reason == "PERMISSION_DENIED"


class TestRoles:
    """Roles within one tenant."""

    def test_a_reader_loads_and_does_not_store(self, site: Site) -> None:
        """PrepareStore, Push into an engine's store, and Reset are refused."""
        with site.client("acme-engine") as engine, site.client("acme-reader") as reader:
            engine.store(KEYS, [payload(key, PART) for key in KEYS])
            assert_serves(reader, KEYS)
            with pytest.raises(
                AccessDenied, match=r"acme-reader must not call .*PrepareStore: the call needs the role engine"
            ):
                reader.store(KEYS, [payload(key, PART) for key in KEYS])
            with pytest.raises(AccessDenied):
                reader.reset()
        with raw(site, "acme-engine") as session, raw(site, "acme-reader") as mine:
            store = session.cache.PrepareStore(
                cache_pb2.PrepareStoreRequest(session=session.ref, keys=pack_keys([b"fresh" * 4 + bytes(4)])),
                timeout=60,
            )
            frame = transfer_pb2.PushRequest(session=mine.ref, store_id=store.store_id).SerializeToString()
            assert refused(lambda: mine.push(iter([frame]), timeout=60)) == NOT_FOR_YOU
            with tls_route(site, "acme-reader").open(mine) as stream:
                stream.send(push_call(store.store_id))
                assert stream.refusal() == NOT_FOR_YOU
        # The log line is written a moment later.
        wait_until(
            lambda: any('"acme-reader"' in line and "TransferService/Push" in line for line in site.audit_lines())
        )

    def test_admin_calls_and_cache_calls_have_separate_roles(self, site: Site) -> None:
        """Only an admin calls AdminService, and an admin calls nothing else."""
        endpoint = parse_endpoint(site.server.tcp)
        for name, statuses in (("boss", ("OK", "PERMISSION_DENIED")), ("acme-far", ("PERMISSION_DENIED", "OK"))):
            with connected(site.credentials(name).channel(endpoint, CHANNEL_OPTIONS)) as channel:
                admin = admin_pb2_grpc.AdminServiceStub(channel)
                sessions = session_pb2_grpc.SessionServiceStub(channel)
                opening = session_pb2.OpenRequest(
                    protocol_version=2, engine_id="e", namespace=namespace_of(PART).to_proto()
                )
                calls = (
                    lambda admin=admin: admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=60),  # type: ignore[misc]
                    lambda s=sessions, o=opening: next(s.Open(o, timeout=60)),  # type: ignore[misc]
                )
                for call, status in zip(calls, statuses, strict=True):
                    if status == "OK":
                        call()
                    else:
                        assert refused(call) == NOT_FOR_YOU

    def test_a_metrics_token_may_call_no_rpc(self, site: Site) -> None:
        with site.client("prometheus") as client:
            assert refusal_error(client).reason == "PERMISSION_DENIED"
        assert all(Role.METRICS not in (roles or ()) for roles in RPC_ROLES.values())


class TestSharedMemory:
    """Access to the region, which contains the blocks of all tenants."""

    def test_only_trusted_entries_get_shared_memory(self, site: Site) -> None:
        """Others are refused if they ask for it, and stream over the Unix socket."""
        with site.client("acme-engine", unix=True) as near, site.client("acme-far", unix=True) as far:
            near.wait_until_connected(60)
            wait_for_bulk(far)
            assert (near.transport, far.transport) == ("shm", "tcp")
            far.store(KEYS, [payload(key, PART) for key in KEYS])
            assert_serves(near, KEYS)
            path = f"{site.server.path}.shm"
            for client, granted in ((near, True), (far, False)):
                session = client._transport.session
                assert (attach_reply(path, session.ref) is not None) == granted

    def test_explicit_shared_memory_without_permission_is_an_error(self, site: Site) -> None:
        """With "auto" the client uses streams, and the link reports why."""
        with site.client("acme-far", unix=True, transport="shm") as client:
            error = refusal_error(client)
            assert isinstance(error, AccessDenied)
            assert "shared_memory" in str(error)
        with site.client("acme-far", unix=True) as client:
            client.wait_until_connected(60)
            session = client._transport.session
            assert "shared_memory" in session.transport_reason

    def test_clients_of_the_unix_socket_need_no_token(self, site: Site) -> None:
        """Permission to open the Unix socket is enough by default."""
        with Client(site.server.endpoint, namespace=namespace_of(PART, tenant="acme")) as client:
            client.wait_until_connected(60)
            assert client.transport == "shm"
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            assert client.status().tiers


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Returns a server that needs tokens on its Unix socket and on its HTTP port as well."""
    made = make_site(
        tmp_path_factory.mktemp("u"), config='metrics = "127.0.0.1:0"', auth="unix = true\nmetrics = true\n"
    )
    try:
        made.server.start(backed=False)
        yield made
    finally:
        made.server.close()


class TestStrict:
    """Tokens are required on every socket."""

    def test_the_unix_socket_requires_a_token(self, strict: Site) -> None:
        """With a token a client is served and gets shared memory; without one it is refused."""
        with Client(strict.server.endpoint, namespace=namespace_of(PART)) as client:
            assert refusal_error(client).reason == "UNAUTHENTICATED"
        with strict.client("acme-engine", unix=True) as client:
            client.wait_until_connected(60)
            assert client.transport == "shm"
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            assert_serves(client, KEYS)
        with strict.client("acme-far", unix=True) as client:
            wait_for_bulk(client)
            assert_serves(client, KEYS)

    def test_metrics_require_a_token_and_health_does_not(self, strict: Site) -> None:
        """The token needs the role metrics or admin."""
        url = f"http://127.0.0.1:{ready_line(strict.server)['metrics_port']}"
        with urlopen(f"{url}/healthz", timeout=60) as answer:  # noqa: S310 - a port of ours
            assert answer.status == 200
        for name, status in (("prometheus", 200), ("boss", 200), ("acme-engine", 401), (None, 401)):
            headers = {"Authorization": f"Bearer {strict.tokens.token[name]}"} if name else {}
            try:
                with urlopen(Request(f"{url}/metrics", headers=headers), timeout=60) as answer:  # noqa: S310
                    assert (answer.status, b"kvtier_" in answer.read()) == (status, True)
            except HTTPError as error:
                assert error.code == status  # noqa: PT017
                error.close()

    def test_the_command_line_sends_a_token(self, strict: Site, tmp_path: Path) -> None:
        """With `--token-file`; without it the error names what is missing."""
        file = tmp_path / "token"
        file.write_text(strict.tokens.token["boss"])
        command = ["status", "--endpoint", strict.server.endpoint]
        told = [*command, "--token-file", str(file)]
        assert "sessions" in kvtier(*told).stdout
        # the flag overrides it
        environ = {"KVTIER_TOKEN": strict.tokens.token["acme-engine"]}
        assert "sessions" in kvtier(*told, environment=environ).stdout
        assert "a token is needed" in kvtier(*command, code=1).stderr


def test_removing_a_token_ends_its_sessions(tmp_path: Path) -> None:
    """No restart is needed; other sessions continue, and a new token is accepted."""
    site = make_site(tmp_path)
    with site.server.start(), site.client("acme-engine") as gone, site.client("zeta-engine") as stays:
        gone.wait_until_connected(60)
        stays.wait_until_connected(60)
        epoch = stays.epoch
        site.tokens.remove("acme-engine")
        wait_until(lambda: not gone.connected)
        wait_until(lambda: isinstance(error_of(gone, 0.1), AccessDenied))
        added = site.tokens.add("new", "acme", "engine")
        with Client(
            site.server.tcp,
            namespace=namespace_of(PART),
            credentials=Credentials(ca=site.authority.ca, token=added),
        ) as client:
            wait_until(lambda: client.connected)  # the server reads the file again within seconds
        # An unreadable file changes nothing.
        site.tokens.path.write_text("[[tokens]]\nname = 3")
        wait_until(lambda: "the previous tokens stay" in site.server.log)
        stays.lookup(KEYS).release()
        assert stays.epoch == epoch


def remove_unread(site: Site, holder: str) -> None:
    """Removes a token after ten heartbeats of 0.05 s, of which its holder reads one."""
    time.sleep(0.5)
    site.tokens.remove(holder)
    wait_until(lambda: "tokens read again" in site.server.log)


def test_removing_a_token_disconnects_a_client_that_ignores_heartbeats(tmp_path: Path) -> None:
    """Its session stream cannot end, but its calls, connections and access to the region do."""
    site = make_site(tmp_path, heartbeat=0.05)
    with site.server.start():
        # A window of 64 bytes is full after the second heartbeat.
        options = [("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0)]
        credentials = site.credentials("acme-engine")
        with credentials.channel(parse_endpoint(site.server.endpoint), options) as channel:
            sessions = session_pb2_grpc.SessionServiceStub(channel)
            request = session_pb2.CapabilitiesRequest()
            capabilities = sessions.Capabilities(request, timeout=60, wait_for_ready=True)
            stream = sessions.Open(
                session_pb2.OpenRequest(
                    protocol_version=2, engine_id="e", rank=0, namespace=namespace_of(PART).to_proto()
                )
            )
            ref = next(iter(stream)).session
            path = capabilities.region.attach_path
            target = SocketTarget(path, ref, credentials)
            calls = SocketCalls(target)
            lookup = cache_pb2.LookupRequest(session=ref, keys=pack_keys(KEYS)).SerializeToString()
            assert calls.prepare()
            assert calls.call("CacheService/Lookup", lookup, 60)
            remove_unread(site, "acme-engine")
            with contextlib.suppress(SessionLost):  # if the connection ends during the call
                assert calls.call("CacheService/Lookup", lookup, 60) is None
            over_grpc = channel.unary_unary("/kvtier.v1.CacheService/Lookup", None, None)
            assert refused(lambda: over_grpc(lookup, timeout=60))[0] == "UNAUTHENTICATED"
            assert not SocketCalls(target).prepare()
            with pytest.raises(AttachError):
                Attachment.connect(target, path)
            calls.close()
            stream.cancel()


def test_removing_a_token_ends_its_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of the server itself end too, also if the client ignores its heartbeats."""
    # keeps the client that stores the blocks connected
    monkeypatch.setattr(reconnect, "_SILENT_INTERVALS", 10_000)
    site = make_site(tmp_path, config='limits = {max_frame_bytes = "4KiB"}', heartbeat=0.05)
    options = [*CHANNEL_OPTIONS, ("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0)]
    with site.server.start(), site.client("acme-far") as other:
        other.store(KEYS, [payload(key, PART) for key in KEYS])
        with site.credentials("acme-engine").channel(parse_endpoint(site.server.endpoint), options) as channel:
            sessions, cache = session_pb2_grpc.SessionServiceStub(channel), cache_pb2_grpc.CacheServiceStub(channel)
            opening = session_pb2.OpenRequest(
                protocol_version=2, engine_id="e", rank=0, namespace=namespace_of(PART).to_proto()
            )
            stream = sessions.Open(opening, timeout=60, wait_for_ready=True)
            ref = next(iter(stream)).session
            store = cache.PrepareStore(
                cache_pb2.PrepareStoreRequest(session=ref, keys=pack_keys([key_of(99)])), timeout=60
            )
            lookup = cache_pb2.LookupRequest(session=ref, keys=pack_keys(KEYS))
            lease = cache.Lookup(lookup, timeout=60)
            assert lease.prefix_hits == len(KEYS)
            frames: SimpleQueue[bytes | None] = SimpleQueue()
            frame = transfer_pb2.PushRequest(
                session=ref, store_id=store.store_id, payload=bytes(64), xxh3_64=xxhash.xxh3_64_intdigest(bytes(64))
            ).SerializeToString()
            push = channel.stream_unary(PUSH, None, transfer_pb2.PushResponse.FromString)
            pushing = push.future(iter(frames.get, None), timeout=60)
            frames.put(frame)
            pull = channel.unary_stream(PULL, transfer_pb2.PullRequest.SerializeToString, None)
            pulling = pull(
                transfer_pb2.PullRequest(session=ref, lease_id=lease.lease_id, items=range(len(KEYS))), timeout=60
            )
            next(pulling)
            remove_unread(site, "acme-engine")
            frames.put(frame)
            frames.put(None)
            gone = ("UNAUTHENTICATED", "UNKNOWN_SESSION")
            assert refused(pushing.result) == gone
            assert refused(lambda: list(pulling)) == gone
            stream.cancel()


def test_a_client_rereads_its_token_file(tmp_path: Path) -> None:
    """After the token in the file is replaced, a new session opens with it."""
    site = make_site(tmp_path)
    file = tmp_path / "mine"
    file.write_text(site.tokens.token["acme-engine"])
    with site.server.start():
        credentials = Credentials(ca=site.authority.ca, token_file=str(file))
        with Client(site.server.tcp, namespace=namespace_of(PART), credentials=credentials) as client:
            client.wait_until_connected(60)
            file.write_text(site.tokens.add("next", "acme", "engine"))
            site.tokens.remove("acme-engine")
            wait_until(lambda: "tokens read again" in site.server.log)
            wait_until(lambda: client.connected and not fails(client))


def fails(client: Client) -> bool:
    """Returns whether a lookup fails; False if it works."""
    try:
        client.lookup(KEYS).release()
    except Exception:  # noqa: BLE001 - any error counts
        return True
    return False


class TestAudit:
    """Lines of the audit log."""

    def test_refusals_and_admin_calls_are_logged(self, site: Site) -> None:
        """A line names caller, method and outcome; repetitions are combined; no token is logged."""
        with connected(site.credentials("boss").channel(parse_endpoint(site.server.tcp))) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            list(admin.Evict(admin_pb2.EvictRequest(dry_run=True), timeout=60))
            wait_until(lambda: any("AdminService/Evict" in line for line in site.audit_lines()))
            before = len(site.audit_lines())  # lines of earlier tests, all written by now
            for _ in range(50):
                admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=60)
            list(admin.Fsck(admin_pb2.FsckRequest(), timeout=60))
        with connected(site.credentials("acme-far").channel(parse_endpoint(site.server.tcp))) as channel:
            for _ in range(50):
                status_of(
                    lambda c=channel: admin_pb2_grpc.AdminServiceStub(c).GetStatus(admin_pb2.GetStatusRequest())  # type: ignore[misc]
                )
        with connected(Credentials(ca=site.authority.ca).channel(parse_endpoint(site.server.tcp))) as channel:
            status_of(lambda c=channel: admin_pb2_grpc.AdminServiceStub(c).GetStatus(admin_pb2.GetStatusRequest()))  # type: ignore[misc]
        # The log line is written a moment later.
        wait_until(lambda: any("AdminService/Fsck" in line for line in site.audit_lines()[before:]))
        wait_until(lambda: any("ipv4:127.0.0.1" in line for line in site.audit_lines()))
        lines = [json.loads(line) for line in site.audit_lines()]
        looks = [line["who"] == "boss" and line["what"].endswith("GetStatus") for line in lines]
        refusals = [(line["who"], line["outcome"]) == ("acme-far", "refused: PERMISSION_DENIED") for line in lines]
        for found, most in ((looks, 3), (refusals, 6)):
            assert any(found)
            assert sum(found[before:]) <= most
        [check] = [line for line in lines[before:] if line["what"].endswith("Fsck") and line["who"] == "boss"]
        assert check["outcome"] == "OK"
        assert any(line["who"].startswith("ipv4:127.0.0.1") for line in lines)
        assert not [name for name, token in site.tokens.token.items() if token in site.server.log]


class TestTokenCommand:
    """`kvtier token new`."""

    def test_prints_the_token_once_and_writes_its_hash(self, tmp_path: Path) -> None:
        """The file is readable by its owner only, works, and does not contain the token."""
        file = tmp_path / "tokens.toml"
        made = [
            kvtier("token", "new", "--file", str(file), *more).stdout.strip()
            for more in (["--tenant", "acme", "--role", "engine"], ["--role", "admin", "--name", "me"])
        ]
        assert len(set(made)) == 2
        assert file.stat().st_mode & 0o777 == 0o600
        assert not any(token in file.read_text() for token in made)
        config = tmp_path / "c.toml"
        config.write_text(f'[auth]\ntokens = "{file}"\nunix = true\n')
        with launch(tmp_path, "--config", str(config)) as server:
            server.wait_ready()
            endpoint = f"unix:{tmp_path}/s"
            with Client(endpoint, namespace=namespace_of(PART), credentials=Credentials(token=made[0])) as client:
                client.wait_until_connected(60)
            server.end()

    def test_keeps_mode_and_location_of_the_file(self, tmp_path: Path) -> None:
        """The server's user can still read the file, and a link still leads to the same file."""
        file = tmp_path / "tokens.toml"
        command = ["token", "new", "--role", "admin", "--file"]
        kvtier(*command, str(file))
        file.chmod(0o640)
        if os.getuid() == 0:
            os.chown(file, 4711, 4712)
        before = file.stat()
        link = tmp_path / "link"
        link.symlink_to(file)
        kvtier(*command, str(link), "--name", "second")
        after = file.stat()
        assert file.read_text().count("[[tokens]]") == 2
        assert link.is_symlink()
        assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)

    def test_names_what_is_missing_or_invalid(self, tmp_path: Path) -> None:
        """An engine needs a tenant, and a file that is not a token file is left unchanged."""
        file = tmp_path / "tokens.toml"
        file.write_text("nonsense")
        command = ["token", "new", "--role", "engine"]
        assert "--tenant is missing" in kvtier(*command, code=2).stderr
        kvtier(*command, "--tenant", "a", "--file", str(file), code=1)
        assert file.read_text() == "nonsense"
        assert list(tmp_path.iterdir()) == [file]
