"""Names and ids that clients choose or guess, made to look like those of another tenant."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from cryptography import x509
from google.protobuf.duration_pb2 import Duration
from harness.auth_site import KEYS, PART, Site, make_site
from harness.bulk import data_frame, locate, prepare, push_call, tls_route
from harness.certificates import Pair
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.raw import RawSession, refusal_of

from kvtier.client import ConversationAction, ConversationClient, InvalidRequest, KVTierError
from kvtier.client.session.socket_calls import SocketTarget
from kvtier.protos.v1 import (
    cache_pb2,
    conversation_pb2,
    conversation_pb2_grpc,
    events_pb2,
    events_pb2_grpc,
    handoff_pb2,
    transfer_pb2,
)
from kvtier.protos.wire.packed_keys import pack_keys, unpack_keys
from kvtier.protos.wire.socket_frames import Purpose, pack_end

DELETE = ConversationAction.DELETE


def equal_names(digest_size: int) -> tuple[str, str]:
    """Returns two names of tenants with one tag of this size. 4 bytes take about 100,000 names."""
    seen: dict[bytes, str] = {}
    for number in itertools.count():
        name = f"tenant-{number}"
        tag = hashlib.blake2b(name.encode(), digest_size=digest_size, person=b"kvtier.tenant").digest()
        if (other := seen.setdefault(tag, name)) != name:
            return other, name
    raise AssertionError


def session_of(site: Site, name: str, **more: Any) -> RawSession:
    return RawSession(site.server.tcp, namespace_of(PART), engine_id="e", credentials=site.credentials(name, **more))


@pytest.fixture(scope="module")
def names() -> tuple[str, str]:
    return equal_names(4)


@pytest.fixture(scope="module")
def twins(names: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yields a server in which the tenant "victim" has blocks and a conversation."""
    victim, thief = names
    quotas = "\n".join(f'[tenants.{name}]\nquota = "20%"' for name in names)
    made = make_site(tmp_path_factory.mktemp("t"), config=quotas)
    made.tokens.add("victim", victim, "engine")
    made.tokens.add("thief", thief, "engine")
    with made.server.start(), made.client("victim") as client:
        client.wait_until_connected(60)
        with client.begin_request("r", KEYS, conversation_id="c"):
            client.store(KEYS, [payload(key, PART) for key in KEYS])
        yield made


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("m")
    made = make_site(directory, tls=f'client_ca = "{directory / "ca.pem"}"')
    entries = (
        ("dns:engine.zeta.example", "zeta"),
        ("uri:spiffe://zeta/engine", "zeta"),
        ("cn:zeta engine", "zeta"),
        ("dns:engine.acme.example", "acme"),
    )
    with made.tokens.path.open("a") as file:
        for name, tenant in entries:
            file.write(f'[[certificates]]\nname = "{name}"\ntenant = "{tenant}"\nroles = ["engine"]\n')
    with made.server.start():
        yield made


class TestEqualTags:
    """Two tenants whose names had the same tag when tags had 4 bytes."""

    def test_events_are_those_of_the_tenant(self, twins: Site) -> None:
        """The thief's replay is empty; the victim's has all blocks."""

        def replayed(name: str) -> set[bytes]:
            with session_of(twins, name) as session:
                stub = events_pb2_grpc.EventServiceStub(session.channel)
                request = events_pb2.WatchEventsRequest(session=session.ref, all_namespaces=True)
                stream = stub.WatchEvents(request, timeout=60)
                found: set[bytes] = set()
                for response in stream:
                    found |= {
                        key
                        for event in response.events
                        for key in unpack_keys(event.keys.keys, event.keys.key_bytes or 1)
                    }
                    if response.phase == events_pb2.REPLAY_PHASE_END:
                        stream.cancel()
                        return found
                raise AssertionError

        assert replayed("victim") >= set(KEYS)
        assert replayed("thief") == set()

    def test_conversations_are_those_of_the_tenant(self, twins: Site) -> None:
        """Neither by name, nor by a key, nor with the id of the victim's namespace."""
        with ConversationClient(twins.server.tcp, timeout=60, credentials=twins.credentials("victim")) as own:
            (known,) = own.list().conversations
        with ConversationClient(twins.server.tcp, timeout=60, credentials=twins.credentials("thief")) as thief:
            assert thief.list().conversations == ()
            for target in (
                {"conversation_id": "c"},
                {"last_key": KEYS[0]},
                {"keys": KEYS, "namespace_id": known.namespace_id},
            ):
                with pytest.raises(InvalidRequest) as error:
                    thief.act(DELETE, **target)
                assert error.value.reason in ("CONVERSATION_NOT_FOUND", "INVALID_ARGUMENT")
        with twins.client("victim") as client, client.lookup(KEYS) as lease:
            assert lease.prefix_hits == len(KEYS)

    def test_quotas_are_those_of_the_tenant(self, twins: Site, names: tuple[str, str]) -> None:
        """Bytes of one tenant do not count for the other."""
        used = {share.tenant: share.used_bytes for share in twins.server.tier("cpu").shares}
        assert used[names[0]] >= PART * len(KEYS)
        assert used[names[1]] == 0

    def test_blocks_are_those_of_the_tenant(self, twins: Site) -> None:
        with twins.client("thief") as thief, thief.lookup(KEYS) as lease:
            assert lease.prefix_hits == 0


class TestIds:
    """An id of another tenant, guessed or leaked."""

    def test_ids_do_not_count_what_other_tenants_do(self, site: Site) -> None:
        """Neither of leases nor of stores; and an id close to one's own is not another one."""
        with site.client("zeta-engine") as zeta:
            zeta.store(KEYS, [payload(key, PART) for key in KEYS])
        with session_of(site, "acme-far") as acme, session_of(site, "zeta-engine") as zeta_raw:
            ids: list[int] = []
            for number in range(20):
                request = cache_pb2.PrepareStoreRequest(session=acme.ref, keys=pack_keys([key_of(1000 + number)]))
                ids.append(acme.cache.PrepareStore(request, timeout=60).store_id)
                found = zeta_raw.cache.Lookup(
                    cache_pb2.LookupRequest(session=zeta_raw.ref, keys=pack_keys(KEYS)), timeout=60
                )
                ids.append(found.lease_id)
        assert len(set(ids)) == len(ids)
        assert min(abs(one - other) for one, other in itertools.combinations(ids, 2)) > 1000

    def test_an_id_of_another_tenant_does_not_exist(self, site: Site) -> None:
        """The refusal is the same as for an unknown id, in all calls and transports."""
        with session_of(site, "zeta-engine") as zeta, session_of(site, "acme-far") as acme:
            request = cache_pb2.PrepareStoreRequest(session=zeta.ref, keys=pack_keys([key_of(77)]))
            store = zeta.cache.PrepareStore(request, timeout=60).store_id
            with site.client("zeta-engine") as client:
                client.store(KEYS, [payload(key, PART) for key in KEYS])
            lease = zeta.cache.Lookup(
                cache_pb2.LookupRequest(session=zeta.ref, keys=pack_keys(KEYS)), timeout=60
            ).lease_id
            assert lease

            def refusal(method: str, request: Any) -> tuple[Any, str]:
                with pytest.raises(grpc.RpcError) as error:
                    acme.method(method)(request, timeout=60)  # type: ignore[operator]
                text = error.value.details() or ""
                for number in (store, lease, store ^ 1, lease ^ 1):
                    text = text.replace(str(number), "N")
                return refusal_of(error.value), text

            calls: list[tuple[str, Callable[[int], Any], int]] = [
                ("CompleteStore", lambda n: cache_pb2.CompleteStoreRequest(session=acme.ref, store_id=n), store),
                ("PrepareLoad", lambda n: cache_pb2.PrepareLoadRequest(session=acme.ref, lease_id=n, items=[0]), lease),
                ("CompleteLoad", lambda n: cache_pb2.CompleteLoadRequest(session=acme.ref, lease_id=n), lease),
            ]
            for method, make, number in calls:
                assert refusal(method, make(number)) == refusal(method, make(number ^ 1)), method
            for method, request_type in (
                ("ReleaseLease", cache_pb2.ReleaseLeaseRequest),
                ("Touch", cache_pb2.TouchRequest),
            ):
                answers = [
                    acme.method(method)(request_type(session=acme.ref, lease_ids=[n]), timeout=60)  # type: ignore[operator]
                    for n in (lease, lease ^ 1)
                ]
                assert str(answers[0]).replace(str(lease), "N") == str(answers[1]).replace(str(lease ^ 1), "N"), method
            with tls_route(site).open(acme, Purpose.CALLS) as connection:
                texts = []
                for number in (store, store ^ 1):
                    request = cache_pb2.CompleteStoreRequest(session=acme.ref, store_id=number)
                    code, message = connection.call("CacheService/CompleteStore", request)
                    texts.append((code, message.replace(str(number).encode(), b"N")))
                assert texts[0] == texts[1]
            # The victim still has both.
            zeta.cache.PrepareLoad(
                cache_pb2.PrepareLoadRequest(session=zeta.ref, lease_id=lease, items=[0]), timeout=60
            )

    @pytest.mark.parametrize("way", ["grpc", "calls"])
    def test_streams_of_another_tenant_continue(self, site: Site, way: str) -> None:
        """CompleteStore ends the streams of a store, but only of an own one."""
        zeta_route = tls_route(site, "zeta-engine")
        with session_of(site, "zeta-engine") as zeta, session_of(site, "acme-far") as acme:
            keys = [key_of(number, salt=f"streams {way}") for number in range(2)]
            store, data = prepare(zeta, keys), b"".join(payload(key, PART).tobytes() for key in keys)
            frame = data_frame(data, 0, 0)
            request = cache_pb2.CompleteStoreRequest(session=acme.ref, store_id=store)
            with zeta_route.open(zeta) as stream:
                stream.send(push_call(store))
                wait_until(lambda: stream.send(data_frame(data[:4096], 0, 0)) or locate(zeta, store).received_bytes)
                stream.send(frame[: PART // 2])
                if way == "grpc":
                    with pytest.raises(grpc.RpcError) as error:
                        acme.cache.CompleteStore(request, timeout=60)
                    assert refusal_of(error.value) == ("NOT_FOUND", "STORE_NOT_FOUND")
                else:
                    with tls_route(site).open(acme, Purpose.CALLS) as connection:
                        connection.send_call("CacheService/CompleteStore", request)
                        assert connection.refusal() == ("NOT_FOUND", "STORE_NOT_FOUND")
                stream.send(frame[PART // 2 :], pack_end(1))
                code, message = stream.answer()
                assert code == 0
                assert transfer_pb2.PushResponse.FromString(message).received_bytes > len(data)

    def test_holds_of_another_tenant_do_not_exist(self, site: Site) -> None:
        """A claim waits for the hold of its tenant, if another tenant holds the same request."""
        with session_of(site, "acme-far") as acme, session_of(site, "zeta-engine") as zeta:
            for session in (acme, zeta):
                if session is zeta:
                    hold = handoff_pb2.HoldRef(engine_id="e", request_id="same")
                    request = handoff_pb2.ClaimHoldRequest(session=zeta.ref, hold=hold, wait=Duration(seconds=30))
                    claim = zeta.handoff.ClaimHold.future(request, timeout=60)
                    for _ in range(20):  # the claim arrives before
                        zeta.cache.Lookup(cache_pb2.LookupRequest(session=zeta.ref, keys=pack_keys(KEYS)), timeout=60)
                published = handoff_pb2.PublishHoldRequest(
                    session=session.ref, request_id="same", duration=Duration(seconds=600)
                )
                answer = session.handoff.PublishHold(published, timeout=60)
                assert answer.status == handoff_pb2.PUBLISH_STATUS_PUBLISHED
            assert claim.result(timeout=60).num_tokens == 0

    def test_a_session_of_another_tenant_does_not_exist(self, site: Site) -> None:
        """Not even its id, 128 secret bits, is confirmed; the audit log has the attempt."""
        with session_of(site, "zeta-engine") as zeta, session_of(site, "acme-far") as acme:
            answers = []
            for session_id in (zeta.ref.session_id, bytes(16)):
                ref = type(zeta.ref)(session_id=session_id, epoch=zeta.ref.epoch)
                with pytest.raises(grpc.RpcError) as error:
                    acme.cache.Lookup(cache_pb2.LookupRequest(session=ref, keys=pack_keys(KEYS)), timeout=60)
                answers.append((refusal_of(error.value), error.value.details()))
                for purpose in (Purpose.CALLS, Purpose.STREAMS):
                    with tls_route(site).dial(acme, purpose, ref) as connection:
                        answers[-1] += (connection.refusal(),)  # type: ignore[operator]
            assert answers[0] == answers[1]
            wait_until(lambda: [line for line in site.audit_lines() if "refused: WRONG_TENANT" in line])

    def test_pages_of_conversations_do_not_count_those_of_others(self, site: Site) -> None:
        """The number of the next page is that within the tenant."""
        for name, count in (("zeta-engine", 7), ("acme-far", 3)):
            with site.client(name) as client:
                client.wait_until_connected(60)
                for number in range(count):
                    with client.begin_request(f"{number}", KEYS, conversation_id=f"c{number}"):
                        pass
        with session_of(site, "acme-far") as acme:
            stub = conversation_pb2_grpc.ConversationServiceStub(acme.channel)
            page, seen = 0, []
            while True:
                request = conversation_pb2.ListConversationsRequest(max_conversations=1, page=page)
                answer = stub.ListConversations(request, timeout=60)
                seen += [each.conversation_id for each in answer.conversations]
                page = answer.next_page
                if not page:
                    break
                assert page <= 3
            assert seen == ["c2", "c1", "c0"]


class TestCertificates:
    """Certificates of one authority, issued to a tenant that chooses some of the names."""

    @staticmethod
    def outcomes(site: Site, victim: RawSession, pair: Pair) -> list[str]:
        """Returns the outcome of a call over gRPC and of hellos for calls and streams."""
        credentials = site.credentials(cert=pair.cert, key=pair.key)
        found = []
        try:
            with RawSession(site.server.tcp, namespace_of(PART), engine_id="e", credentials=credentials):
                found.append("accepted")
        except grpc.RpcError as error:
            found.append(refusal_of(error)[1] or "")
        address = tls_route(site).address(victim)
        for purpose in (Purpose.CALLS, Purpose.STREAMS):
            try:
                SocketTarget(address, victim.ref, credentials, "127.0.0.1").connect(purpose, 60).close()
                found.append("accepted")
            except KVTierError as error:
                found.append(error.reason or "")
        return found

    def test_only_the_names_of_an_entry_are_its_names(self, mutual: Site) -> None:
        """Over gRPC and over the sockets for calls and streams, with the same result."""
        dns, uri, email = x509.DNSName, x509.UniformResourceIdentifier, x509.RFC822Name
        nul = dns("engine.zeta.example")
        nul._value = "engine.zeta.example\0.acme.example"  # type: ignore[attr-defined]
        good: list[tuple[list[str], list[x509.GeneralName]]] = [
            (["x"], [dns("engine.zeta.example")]),
            (["x"], [dns("ENGINE.Zeta.example.")]),
            (["x"], [uri("spiffe://zeta/engine")]),
            (["zeta engine"], []),
        ]
        bad: list[tuple[list[str], list[x509.GeneralName]]] = [
            (["engine.zeta.example"], []),
            (["dns:engine.zeta.example"], []),
            (["zeta engine"], [dns("other.example")]),
            (["zeta engine", "x"], []),
            (["x"], [uri("engine.zeta.example")]),
            (["x"], [uri("spiffe://ZETA/engine")]),
            (["x"], [dns("*.zeta.example")]),
            (["x"], [nul]),
            (["x"], [email("spiffe://zeta/engine@a.example")]),
            (["x"], [dns("engine.zeta.example"), dns("engine.acme.example")]),
        ]
        accepted, refused = ["accepted"] * 3, ["UNAUTHENTICATED"] * 3
        owner = mutual.authority.issue("owner", only=good[0][1])
        with session_of(mutual, "zeta-engine", cert=owner.cert, key=owner.key) as victim:
            for cases, expected in ((good, accepted), (bad, refused)):
                for common, names in cases:
                    pair = mutual.authority.issue("probe", common=common, only=names)
                    assert self.outcomes(mutual, victim, pair) == expected, (common, names)

    def test_a_certificate_of_another_tenant_gets_no_session(self, mutual: Site) -> None:
        owner = mutual.authority.issue("owner", dns="engine.zeta.example")
        other = mutual.authority.issue("other", dns="engine.acme.example")
        with session_of(mutual, "zeta-engine", cert=owner.cert, key=owner.key) as victim:
            assert self.outcomes(mutual, victim, other) == ["accepted", "UNKNOWN_SESSION", "UNKNOWN_SESSION"]
