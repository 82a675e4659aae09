"""Random calls have the same results on the fake server and on a real one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from harness.server_process import MIB, ServerProcess

from kvtier.client import (
    Client,
    ConversationAction,
    ConversationClient,
    Group,
    HandoffDirection,
    HoldName,
    KVTierError,
    Namespace,
    make_key,
)
from kvtier.client.testing import FakeServer

STEPS = 250
SIZES = (40, 24)
NAMESPACE = Namespace("random calls", "uint8", (Group(SIZES[0], 16), Group(SIZES[1], 16)))
ENGINES = ("one", "two")
ACTIONS = [each for each in ConversationAction if each is not ConversationAction.DEMOTE]
"""The fake demotes each block, as if a tier on disk had it."""
FAR = 5000.0
"""Seconds that do not end during a test."""


def key_of(number: int) -> bytes:
    """Returns one of 10 keys, of two groups."""
    return make_key(bytes([number]) * 32, number % 2)


def content(number: int, version: int) -> bytes:
    return bytes([number, version]) * (SIZES[number % 2] // 2)


def outcome(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return call(*arguments, **options)
    except KVTierError as error:
        return error.reason or type(error).__name__


class Player:
    """Performs calls on one server. Leases and stores are named by their place in a list."""

    def __init__(self, connect: Callable[[Namespace, str], Client], agents: dict[str, ConversationClient]) -> None:
        self.clients = [connect(replace(NAMESPACE, tenant=tenant), engine) for tenant in agents for engine in ENGINES]
        self.agents = list(agents.values())
        self.leases: list[Any] = []
        self.writes: list[tuple[ExitStack, Any, list[int]]] = []
        self.pages: list[int] = [0, 0]

    def store(self, client: int, numbers: list[int], version: int, request: str) -> Any:
        parts = [content(number, version) for number in numbers]
        return self.clients[client].store([key_of(number) for number in numbers], parts, request_id=request)

    def begin_write(self, client: int, numbers: list[int], request: str) -> Any:
        held = ExitStack()
        batch = held.enter_context(self.clients[client].write([key_of(each) for each in numbers], request_id=request))
        self.writes.append((held, batch, [numbers[place] for place in batch.wanted]))
        return batch.statuses, list(batch.wanted), batch.not_retained

    def end_write(self, place: int, version: int, failed: set[int], *, aborts: bool) -> Any:
        held, batch, numbers = self.writes.pop(place)
        for number, view in zip(numbers, batch.views(), strict=True):
            view[:] = content(number, version)
        batch.failed.update(each for each in failed if each < len(numbers))
        if aborts:
            return held.__exit__(ValueError, ValueError("aborted"), None)
        held.close()
        return None

    def look_up(self, client: int, numbers: list[int], **options: Any) -> Any:
        options.setdefault("request_id", "")
        lease = self.clients[client].lookup([key_of(number) for number in numbers], lease=FAR, **options)
        return self._add(lease), lease.not_retained

    def begin(self, client: int, request: str, numbers: list[int], conversation: str) -> Any:
        keys = [key_of(number) for number in numbers]
        lease = self.clients[client].begin_request(request, keys, conversation_id=conversation, lease=FAR)
        return self._add(lease), lease.policy

    def _add(self, lease: Any) -> Any:
        self.leases.append(lease)
        return bool(lease.id), lease.statuses, lease.prefix_hits, list(lease.keys)

    def claim(self, client: int, hold: HoldName, first_positions: list[int]) -> Any:
        lease = self.clients[client].claim(hold, first_positions=first_positions, lease=FAR)
        found, said = lease.hold, self._add(lease)
        return said, list(found.positions), found.num_tokens, found.direction, found.settled_blocks, _is_far(found)

    def read(self, client: int, place: int, items: list[int], *, by_id: bool) -> Any:
        lease = self.leases[place]
        with self.clients[client].read(lease.id if by_id else lease, items) as batch:
            return [bytes(view) for view in batch.views()]

    def load(self, client: int, numbers: list[int]) -> Any:
        buffers = [bytearray(SIZES[number % 2]) for number in numbers]
        return self.clients[client].load([key_of(number) for number in numbers], buffers), buffers

    def release(self, client: int, places: list[int]) -> Any:
        self.clients[client].release(*(self.leases[place].id for place in places if self.leases[place].id))

    def touch(self, client: int, places: list[int]) -> Any:
        ids = [self.leases[place].id for place in places]
        missing = self.clients[client].touch(*ids, lease=FAR)
        return [place for place, number in zip(places, ids, strict=True) if number in missing]

    def finish(self, client: int, request: str) -> Any:
        self.clients[client].finish_request(request)

    def prefetch(self, client: int, numbers: list[int]) -> Any:
        return self.clients[client].prefetch([key_of(number) for number in numbers])

    def reset(self, client: int) -> Any:
        return self.clients[client].reset()

    def publish(self, client: int, request: str, numbers: list[int], **options: Any) -> Any:
        keys = [key_of(number) for number in numbers]
        positions = [number // 2 for number in numbers]
        published = self.clients[client].publish(request, keys, positions, hold_for=FAR, **options)
        return published.status, published.pending_blocks, _is_far(published)

    def renew(self, client: int, holds: list[HoldName]) -> Any:
        return self.clients[client].renew_holds(*holds, extension=FAR)

    def end_holds(self, client: int, holds: list[HoldName]) -> Any:
        self.clients[client].release_holds(*holds)

    def act(self, agent: int, action: ConversationAction, **target: Any) -> Any:
        retain_for = FAR if action is ConversationAction.RETAIN else None
        return self.agents[agent].act(action, retain_for=retain_for, **target)

    def list(self, agent: int, conversation: str, most: int, *, more: bool) -> Any:
        page = self.agents[agent].list(conversation, page=self.pages[agent] if more else 0, most=most)
        self.pages[agent] = page.next_page
        return (
            page.total,
            bool(page.next_page),
            [
                (
                    each.conversation_id,
                    each.tenant,
                    each.requests,
                    each.blocks,
                    each.tiers[0].blocks,
                    each.tiers[0].retained,
                    each.retained_seconds is not None,
                    each.pinned,
                )
                for each in page.conversations
            ],
        )

    def close(self) -> None:
        while self.writes:
            self.end_write(0, 0, set(), aborts=True)
        for client in self.clients:
            client.close()


def _is_far(held: Any) -> bool:
    """Whether a hold has most of its time left."""
    return bool(held.remaining > FAR / 10)


class Game:
    """The same random calls for both players."""

    def __init__(self, seed: int, players: Sequence[Player]) -> None:
        self.rng = random.Random(seed)
        self.players = players
        self.acts = seed % 2 == 0
        """Whether agents act on conversations. If not, the engines reset their namespaces."""
        self.begun: set[tuple[int, str]] = set()
        self.version = 0
        self.log: list[str] = []

    def step(self) -> None:
        choices = {
            self.store: 4,
            self.begin_write: 1,
            self.end_write: 2,
            self.look_up: 4,
            self.begin: 3,
            self.read: 4,
            self.load: 1,
            self.release: 2,
            self.touch: 1,
            self.finish: 2,
            self.prefetch: 1,
            self.reset: 0 if self.acts else 0.3,
            self.publish: 2,
            self.claim: 3,
            self.renew: 1,
            self.end_holds: 1,
            self.act: 4 if self.acts else 0,
            self.list: 2,
        }
        self.rng.choices(list(choices), list(choices.values()))[0]()

    def both(self, name: str, *arguments: Any, **options: Any) -> None:
        """Performs a call for each player, and compares the outcomes."""
        self.log.append(f"{name}{arguments}{options or ''}")
        fake, real = (outcome(getattr(each, name), *arguments, **options) for each in self.players)
        assert fake == real, f"fake {fake}, real {real}, after\n" + "\n".join(self.log)
        self.log[-1] += f" -> {real}"

    def client(self) -> int:
        return self.rng.choice((0, 0, 0, 1, 1, 2, 3))

    def numbers(self, *, settled: bool = False) -> list[int]:
        """Returns numbers of keys. `settled`: of none that a client is writing now."""
        written = {number for _, _, numbers in self.players[0].writes for number in numbers} if settled else set()
        numbers = self.rng.sample(range(10), self.rng.choice((1, 2, 3, 5)))
        if self.rng.random() < 0.5:
            numbers.sort()
        return [number for number in numbers if number not in written]

    def request(self) -> str:
        return self.rng.choice(("r0", "r0", "r1", "r2"))

    def conversation(self) -> str:
        return self.rng.choice(("a", "b", "c"))

    def hold(self) -> HoldName:
        return HoldName(self.rng.choice(("one", "one", "one", "two")), self.request())

    def place(self) -> int:
        leases = self.players[0].leases
        return self.rng.randrange(max(0, len(leases) - 6), len(leases))

    def store(self) -> None:
        self.version += 1
        numbers = list(dict.fromkeys(self.numbers()))
        self.both("store", self.client(), numbers, self.version % 250, self.rng.choice(("", self.request())))

    def begin_write(self) -> None:
        if len(self.players[0].writes) < 2:
            self.both("begin_write", self.client(), self.numbers(), self.rng.choice(("", self.request())))

    def end_write(self) -> None:
        if self.players[0].writes:
            place = self.rng.randrange(len(self.players[0].writes))
            self.version += 1
            failed = {0} if self.rng.random() < 0.3 else set()
            self.both("end_write", place, self.version % 250, failed, aborts=self.rng.random() < 0.2)

    def look_up(self) -> None:
        options: dict[str, Any] = {"prefix": self.rng.random() < 0.5}
        if self.rng.random() < 0.3:
            options["min_hits"] = self.rng.randint(1, 4)
        if self.rng.random() < 0.5:
            options["request_id"] = self.request()
        self.both("look_up", self.client(), self.numbers(settled=True), **options)

    def begin(self) -> None:
        """Begins a request, or finishes it if it has begun."""
        client, request = self.client(), self.request()
        if (client, request) in self.begun:
            self._finish(client, request)
            return
        self.begun.add((client, request))
        conversation = self.rng.choice(("", self.conversation(), self.conversation()))
        self.both("begin", client, request, self.numbers(settled=True), conversation)

    def read(self) -> None:
        if self.players[0].leases:
            items = [self.rng.randrange(4) for _ in range(self.rng.randint(1, 3))]
            self.both("read", self.client(), self.place(), items, by_id=self.rng.random() < 0.5)

    def load(self) -> None:
        self.both("load", self.client(), self.numbers(settled=True))

    def release(self) -> None:
        if self.players[0].leases:
            self.both("release", self.client(), [self.place() for _ in range(self.rng.randint(1, 3))])

    def touch(self) -> None:
        if self.players[0].leases:
            self.both("touch", self.client(), [self.place() for _ in range(3)])

    def finish(self) -> None:
        self._finish(self.client(), self.request())

    def _finish(self, client: int, request: str) -> None:
        self.begun.discard((client, request))
        self.both("finish", client, request)

    def prefetch(self) -> None:
        self.both("prefetch", self.client(), self.numbers(settled=True))

    def reset(self) -> None:
        self.both("reset", self.client())

    def publish(self) -> None:
        options = {"num_tokens": self.rng.randint(1, 99), "direction": self.rng.choice(list(HandoffDirection))}
        self.both("publish", self.client(), self.request(), self.numbers(), **options)

    def claim(self) -> None:
        first = self.rng.choice(([], [1], [0, 3], [2, 2]))
        self.both("claim", self.client(), self.hold(), first)

    def renew(self) -> None:
        self.both("renew", self.client(), [self.hold() for _ in range(3)])

    def end_holds(self) -> None:
        self.both("end_holds", self.client(), [self.hold()])

    def act(self) -> None:
        """Not while blocks are being written: the real server counts them, too."""
        if self.players[0].writes:
            return
        agent, action = self.rng.choice((0, 0, 1)), self.rng.choice(ACTIONS)
        target: dict[str, Any] = {"conversation_id": self.conversation()}
        if self.rng.random() < 0.3:
            target = {"last_key": key_of(self.rng.randrange(10))}
        self.both("act", agent, action, **target)

    def list(self) -> None:
        conversation = self.rng.choice(("", "", self.conversation()))
        self.both("list", self.rng.choice((0, 1)), conversation, self.rng.randint(1, 3), more=self.rng.random() < 0.5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), region=64 * MIB, lmdb=0).start() as server:
        yield server


@pytest.mark.parametrize("seed", range(8))
def test_both_servers_agree(seed: int, server: ServerProcess) -> None:
    tenants = [f"{seed} {name}" for name in ("own", "other")]
    fake = FakeServer()

    def connect(namespace: Namespace, engine: str) -> Client:
        client = Client(server.endpoint, namespace=namespace, engine_id=engine)
        client.wait_until_connected(60)
        return client

    agents = {tenant: fake.conversation_client(tenant) for tenant in tenants}
    others = {tenant: ConversationClient(server.endpoint, tenant=tenant, timeout=60) for tenant in tenants}
    players = [Player(lambda spec, engine: fake.client(spec, engine_id=engine), agents), Player(connect, others)]
    try:
        game = Game(seed, players)
        for _ in range(STEPS):
            game.step()
    finally:
        for player in players:
            player.close()
        for agent in (*agents.values(), *others.values()):
            agent.close()
