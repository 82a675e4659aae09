"""Index of the blocks of one host: how many leading tokens of a prompt its tiers have.

The index is a tree. A node is a block, and its children are the blocks that follow it, by their
tokens. The names of the nodes are the engine's own block hashes, so the router computes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BlockIndex"]

_Hash = int | bytes
_Place = tuple[str, str]
"""Topic and medium."""
_Name = tuple[str, _Hash]
"""Model in the topic, and hash: engines of different models may give a block the same hash."""
_Child = tuple[str, _Hash | None, tuple[int, ...]]
"""Name of the tree, hash of the parent, tokens of the block."""

_TOPIC_PARTS = 3


@dataclass(slots=True)
class _Block:
    child: _Child
    places: set[_Place] = field(default_factory=set)


class BlockIndex:
    """Blocks of one publisher of events. Only blocks with token ids, of the first KV cache group.

    Blocks of different models or LoRA adapters are in different trees. The name of a tree is that
    of the adapter, or of the model in the topic `kv@ADDRESS@MODEL`, or empty.
    """

    def __init__(self) -> None:
        self.is_reachable = True
        """If false, no block counts: engines cannot load blocks from a server that is away."""
        self._blocks: dict[_Name, _Block] = {}
        self._children: dict[_Child, _Hash] = {}
        self._sizes: dict[str, set[int]] = {}
        """Numbers of tokens of a block, per tree."""

    def __len__(self) -> int:
        return len(self._blocks) if self.is_reachable else 0

    def clear(self) -> None:
        """Forgets all blocks, because the server was restarted or messages are lost."""
        self._blocks.clear()
        self._children.clear()
        self._sizes.clear()

    def apply(self, topic: str, events: Iterable[Mapping[str, Any]]) -> None:
        """Applies events of a message, in the map form."""
        for event in events:
            place = (topic, event.get("medium") or "")
            if event.get("group_idx"):
                continue
            if event["type"] == "BlockStored":
                self._store(event, place)
            elif event["type"] == "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    self._remove(block_hash, place)

    def match(self, tokens: Sequence[int], model: str) -> int:
        """Returns how many leading tokens of a prompt the host has for a model or adapter."""
        return max(self._match(tokens, name) for name in (model, "")) if self.is_reachable else 0

    def _match(self, tokens: Sequence[int], name: str) -> int:
        longest = 0
        for size in self._sizes.get(name, ()):
            parent: _Hash | None = None
            end = 0
            while end + size <= len(tokens):
                found = self._children.get((name, parent, tuple(tokens[end : end + size])))
                if found is None:
                    break
                parent, end = found, end + size
            longest = max(longest, end)
        return longest

    def _store(self, event: Mapping[str, Any], place: _Place) -> None:
        size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
        hashes = event["block_hashes"]
        if not size or len(tokens) != size * len(hashes):
            return  # the server does not know the tokens
        model = _model_of(place[0])
        name = event.get("lora_name") or model
        self._sizes.setdefault(name, set()).add(size)
        for number, block_hash in enumerate(hashes):
            child = (name, parent, tuple(tokens[number * size : (number + 1) * size]))
            block = self._blocks.get((model, block_hash))
            if block is None:
                block = self._blocks[model, block_hash] = _Block(child)
                self._children[child] = block_hash
            block.places.add(place)
            parent = block_hash

    def _remove(self, block_hash: _Hash, place: _Place) -> None:
        name = (_model_of(place[0]), block_hash)
        block = self._blocks.get(name)
        if block is None:
            return
        block.places.discard(place)
        if not block.places:
            del self._blocks[name]
            if self._children.get(block.child) == block_hash:
                del self._children[block.child]


def _model_of(topic: str) -> str:
    """Returns the model in a topic `kv@ADDRESS@MODEL`; empty for another topic."""
    parts = topic.split("@", _TOPIC_PARTS - 1)
    return parts[2] if len(parts) == _TOPIC_PARTS and parts[0] == "kv" else ""
