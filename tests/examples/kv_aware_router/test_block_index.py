"""The index of one host's blocks."""

from __future__ import annotations

from typing import Any

from kv_aware_router.block_index import BlockIndex

PROMPT = list(range(100))
TOPIC = "kv@10.0.0.1:8000@m"


def stored(first: int, last: int, medium: str = "CPU", **more: Any) -> dict[str, Any]:
    """A stored event with the blocks `first` to `last` of the prompt, 10 tokens each."""
    return {
        "type": "BlockStored",
        "block_hashes": list(range(1000 + first, 1000 + last)),
        "parent_block_hash": 999 + first if first else None,
        "token_ids": PROMPT[10 * first : 10 * last],
        "block_size": 10,
        "lora_name": None,
        "medium": medium,
        "group_idx": 0,
        **more,
    }


def removed(*numbers: int, medium: str = "CPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [1000 + each for each in numbers], "medium": medium, "group_idx": 0}


def test_the_longest_known_prefix_counts() -> None:
    index = BlockIndex()
    index.apply(TOPIC, [stored(0, 3), stored(3, 5)])
    assert index.match(PROMPT, "m") == 50
    assert index.match(PROMPT[:49], "m") == 40, "only full blocks"
    assert index.match([*PROMPT[:20], 7, *PROMPT[21:]], "m") == 20
    assert index.match([7, *PROMPT], "m") == 0
    assert index.match([], "m") == 0


def test_a_block_counts_until_no_medium_and_no_topic_has_it() -> None:
    index = BlockIndex()
    index.apply(TOPIC, [stored(0, 3), stored(0, 2, "STORAGE")])
    index.apply("kv@10.0.0.2:8000@m", [stored(0, 1)])
    index.apply(TOPIC, [removed(0, 1, 2)])
    assert index.match(PROMPT, "m") == 20
    index.apply(TOPIC, [removed(0, 1, medium="STORAGE")])
    assert index.match(PROMPT, "m") == 10
    index.apply("kv@10.0.0.2:8000@m", [removed(0), removed(0)])
    assert (index.match(PROMPT, "m"), len(index)) == (0, 0)


def test_a_gap_ends_the_prefix_until_it_is_filled() -> None:
    """A block whose parent was evicted counts again when the parent is back."""
    index = BlockIndex()
    index.apply(TOPIC, [stored(0, 4), removed(1)])
    assert index.match(PROMPT, "m") == 10
    index.apply(TOPIC, [stored(1, 2)])
    assert index.match(PROMPT, "m") == 40


def test_models_and_adapters_have_their_own_blocks() -> None:
    index = BlockIndex()
    index.apply(TOPIC, [stored(0, 3), stored(0, 5, lora_name="adapter", block_hashes=list(range(5)))])
    assert index.match(PROMPT, "other") == 0
    assert index.match(PROMPT, "adapter") == 50
    index.apply("kvtier", [stored(0, 2, block_hashes=[70, 71])])
    assert index.match(PROMPT, "other") == 20, "the topic names no model"


def test_two_models_may_have_the_same_hashes() -> None:
    """The hash that vLLM gives a block does not depend on the model."""
    index = BlockIndex()
    other = "kv@10.0.0.1:8001@other"
    index.apply(TOPIC, [stored(0, 3)])
    index.apply(other, [stored(0, 5)])
    assert (index.match(PROMPT, "m"), index.match(PROMPT, "other"), len(index)) == (30, 50, 8)
    index.apply(TOPIC, [removed(0, 1, 2)])
    assert (index.match(PROMPT, "m"), index.match(PROMPT, "other"), len(index)) == (0, 50, 5)
    index.apply(other, [removed(4)])
    assert index.match(PROMPT, "other") == 40


def test_blocks_without_tokens_and_of_other_groups_are_ignored() -> None:
    index = BlockIndex()
    index.apply(TOPIC, [stored(0, 3, token_ids=[]), stored(0, 3, group_idx=1), removed(8)])
    assert len(index) == 0
    index.apply(TOPIC, [stored(0, 3)])
    index.clear()
    assert index.match(PROMPT, "m") == 0
