"""Conversation table: which blocks the requests of each conversation have used.

An agent sends many requests with growing prompts. The engine names their conversation when a
request begins. The table then records the keys that the request looks up and stores, so that an
agent or a router can act on the blocks without knowing the keys. A restart loses the table.

The table is bounded. If a conversation has too many keys, the table keeps those of its latest
request. If a tenant or the whole table has too many, the table forgets the conversations that were
not used for the longest time. It never forgets a pinned conversation.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import count, islice, takewhile
from operator import attrgetter

from ..secondary_tier import NamespaceId
from ..types import TENANT_TAG_BYTES, EngineSession, NamespaceSpec

__all__ = ["Conversation", "ConversationTable", "number_in"]

MAX_KEYS = 32_768
"""Limit of the keys of a conversation. A key takes about 250 bytes of memory."""
MAX_TENANT_KEYS = 262_144
MAX_ALL_KEYS = 524_288
MAX_TENANT_CONVERSATIONS = 8_192
MAX_ALL_CONVERSATIONS = 32_768

Name = tuple[NamespaceId, str]


class Conversation:
    """The keys that the requests of one conversation have used in one namespace.

    Attributes:
        number: position in the order in which conversations were added, from 1.
        tenant_number: the same among the conversations of its tenant.
        keys: all recorded keys, oldest first.
        latest: the keys of the latest request, head first.
        created_at, used_at: times of the first and the latest request, in seconds.
        requests: number of requests.
        retain_until: time until which its blocks are retained, in seconds; 0 for never.
        pinned: whether its blocks are retained until an operator unpins them.
        is_open: whether the table has the conversation.
    """

    __slots__ = (
        "created_at",
        "id",
        "is_open",
        "keys",
        "latest",
        "namespace",
        "number",
        "pinned",
        "requests",
        "retain_until",
        "tenant",
        "tenant_number",
        "used_at",
    )

    def __init__(
        self,
        number: int,
        tenant_number: int,
        conversation_id: str,
        namespace: NamespaceSpec,
        tenant: str,
        now: float,
    ) -> None:
        self.number = number
        self.tenant_number = tenant_number
        self.id = conversation_id
        self.namespace = namespace
        self.tenant = tenant
        self.keys: dict[bytes, None] = {}
        self.latest: dict[bytes, None] = {}
        self.created_at = self.used_at = now
        self.requests = 0
        self.retain_until = 0.0
        self.pinned = False
        self.is_open = True

    @property
    def name(self) -> Name:
        return self.namespace.id, self.id


def number_in(tag: bytes | None) -> Callable[[Conversation], int]:
    """Returns the function with a conversation's number among those of a tenant, or of all (None).

    A tenant must not see how many conversations the others have.
    """
    return attrgetter("number" if tag is None else "tenant_number")


class _Tenant:
    """The conversations of a tenant, least recently used first."""

    __slots__ = ("conversations", "keys", "numbers")

    def __init__(self) -> None:
        self.conversations: OrderedDict[Name, Conversation] = OrderedDict()
        self.keys = 0
        self.numbers = count(1)

    @property
    def is_over(self) -> bool:
        return self.keys > MAX_TENANT_KEYS or len(self.conversations) > MAX_TENANT_CONVERSATIONS


class ConversationTable:
    """The conversations by name, and how many conversations use each block."""

    def __init__(self) -> None:
        self.keys = 0
        self.forgotten = 0
        """Number of conversations forgotten because of a limit."""
        self._count = 0
        self._numbers = count(1)
        self._tenants: dict[bytes, _Tenant] = {}
        self._namespaces: dict[tuple[bytes, str], dict[NamespaceId, Conversation]] = {}
        """Per tenant and id, the conversations of all namespaces."""
        self._users: dict[NamespaceId, dict[bytes, int]] = defaultdict(dict)
        """Per block the number of conversations that use it."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Conversation]:
        for tenant in self._tenants.values():
            yield from tenant.conversations.values()

    def begin_request(self, session: EngineSession, conversation_id: str, now: float) -> Conversation:
        """Returns the conversation of a new request, and adds it if it is unknown."""
        namespace = session.namespace
        tenant = self._tenants.setdefault(_tag(namespace.id), _Tenant())
        name = namespace.id, conversation_id
        conversation = tenant.conversations.get(name)
        if conversation is None:
            conversation = Conversation(
                next(self._numbers), next(tenant.numbers), conversation_id, namespace, session.tenant, now
            )
            tenant.conversations[name] = conversation
            self._namespaces.setdefault((_tag(namespace.id), conversation_id), {})[namespace.id] = conversation
            self._count += 1
        tenant.conversations.move_to_end(name)
        conversation.latest = {}
        conversation.used_at = now
        conversation.requests += 1
        self._limit(tenant, conversation)
        return conversation

    def add(self, conversation: Conversation, keys: Iterable[bytes]) -> None:
        """Records keys that a request has used. Does nothing for a forgotten conversation."""
        if not conversation.is_open:
            return
        latest, known = conversation.latest, conversation.keys
        fresh = (key for key in dict.fromkeys(keys) if key not in latest)
        added = list(islice(fresh, max(0, MAX_KEYS - len(latest))))
        latest.update(dict.fromkeys(added))
        new = [key for key in added if key not in known]
        if len(known) + len(new) > MAX_KEYS:
            self._discard(conversation, [key for key in known if key not in latest])
        users = self._users[conversation.namespace.id]
        for key in new:
            known[key] = None
            users[key] = users.get(key, 0) + 1
        tenant = self._tenants[_tag(conversation.namespace.id)]
        tenant.keys += len(new)
        self.keys += len(new)
        self._limit(tenant, conversation)

    def discard(self, conversation: Conversation, keys: Iterable[bytes]) -> None:
        """Removes keys of a conversation; ignores other keys."""
        if conversation.is_open:
            self._discard(conversation, [key for key in keys if key in conversation.keys])

    def forget(self, conversation: Conversation) -> None:
        """Removes a conversation. The tiers keep its blocks."""
        if not conversation.is_open:
            return
        self._discard(conversation, list(conversation.keys))
        conversation.is_open = False
        tag = _tag(conversation.namespace.id)
        tenant = self._tenants[tag]
        del tenant.conversations[conversation.name]
        self._count -= 1
        if not tenant.conversations:
            del self._tenants[tag]
        same_id = self._namespaces[tag, conversation.id]
        del same_id[conversation.namespace.id]
        if not same_id:
            del self._namespaces[tag, conversation.id]

    def named(self, tag: bytes | None, conversation_id: str) -> list[Conversation]:
        """Returns the conversations with this id of a tenant, or of all (None)."""
        tags = self._tenants if tag is None else [tag]
        return [each for one in tags for each in self._namespaces.get((one, conversation_id), {}).values()]

    def page(self, tag: bytes | None, before: int, most: int) -> list[Conversation]:
        """Returns up to `most` conversations with a number below `before` (0: all), newest first.

        `tag` selects the tenant; None means all tenants. Takes about 0.2 µs per conversation.
        """
        tenants = self._tenants.values() if tag is None else filter(None, [self._tenants.get(tag)])
        number = number_in(tag)
        found = (
            each for tenant in tenants for each in tenant.conversations.values() if not before or number(each) < before
        )
        return nlargest(most, found, key=number)

    def count_of(self, tag: bytes | None) -> int:
        """Returns the number of conversations of a tenant, or of all (None)."""
        if tag is None:
            return self._count
        tenant = self._tenants.get(tag)
        return len(tenant.conversations) if tenant is not None else 0

    def prompts(self, tag: bytes, last_key: bytes) -> list[tuple[NamespaceSpec, list[bytes]]]:
        """Returns the keys that a conversation has used up to a key, per namespace of a tenant.

        Of several conversations that have used it, the most recently used counts.
        """
        tenant = self._tenants.get(tag)
        found = [] if tenant is None else [each for each in tenant.conversations.values() if last_key in each.keys]
        latest = {each.namespace: each for each in found}
        return [(spec, [*takewhile(last_key.__ne__, each.keys), last_key]) for spec, each in latest.items()]

    def users(self, namespace: NamespaceId, key: bytes) -> int:
        """Returns how many conversations use a block."""
        users = self._users.get(namespace)
        return users.get(key, 0) if users else 0

    def retained(self, namespaces: Collection[NamespaceId], now: float) -> Sequence[Conversation]:
        """Returns the conversations of these namespaces whose blocks are retained."""
        tenants = filter(None, [self._tenants.get(tag) for tag in sorted(set(map(_tag, namespaces)))])
        found = (each for tenant in tenants for each in tenant.conversations.values())
        return [each for each in found if each.namespace.id in namespaces and (each.pinned or each.retain_until > now)]

    def _discard(self, conversation: Conversation, keys: Sequence[bytes]) -> None:
        """Removes recorded keys of a conversation."""
        namespace = conversation.namespace.id
        users = self._users[namespace]
        for key in keys:
            del conversation.keys[key]
            conversation.latest.pop(key, None)
            if users[key] == 1:
                del users[key]
            else:
                users[key] -= 1
        if not users:
            del self._users[namespace]
        self._tenants[_tag(namespace)].keys -= len(keys)
        self.keys -= len(keys)

    def _limit(self, tenant: _Tenant, current: Conversation) -> None:
        """Forgets conversations until the tenant and the table are within their limits."""
        while tenant.is_over and self._forget_oldest(tenant, current):
            pass
        while self.keys > MAX_ALL_KEYS or self._count > MAX_ALL_CONVERSATIONS:
            by_keys = self.keys > MAX_ALL_KEYS
            largest = max(self._tenants.values(), key=lambda each: each.keys if by_keys else len(each.conversations))
            if not self._forget_oldest(largest, current):
                return

    def _forget_oldest(self, tenant: _Tenant, current: Conversation) -> bool:
        """Forgets a tenant's least recently used conversation; returns whether there was one."""
        others = (each for each in tenant.conversations.values() if not each.pinned and each is not current)
        oldest = next(others, None if current.pinned or not current.is_open else current)
        if oldest is None:
            return False
        self.forget(oldest)
        self.forgotten += 1
        return True


def _tag(namespace: NamespaceId) -> bytes:
    return namespace[:TENANT_TAG_BYTES]
