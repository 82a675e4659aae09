"""Keys of real vLLM requests whose KV depends on images, LoRA adapters and cache salts."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.polling import wait_until
from tiny_models import make_adapter

from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.lora import LoraAdapters
from kvtier.client.engines.vllm.scheduler.requests import RequestRegistration, VllmRequest
from kvtier.client.offload import CacheGeometry, CacheGroup

BLOCK = 16
PROMPT = list(range(100, 100 + 3 * BLOCK + 5))
"""Three full blocks and a partial one."""
GROUP = CacheGroup(0, BLOCK, None, ("layer",), (64,))

IMAGES = {
    "none": (),
    "A": (("A", 20, 8),),
    "B": (("B", 20, 8),),
    "A later": (("A", 50, 2),),
    "both": (("A", 20, 4), ("B", 24, 4)),
}
"""Content, first token and number of tokens of each image. All prompts have the same tokens."""
ADAPTERS = ("none", "first", "second")
SALTS = (None, "x", "y")


class Inputs(NamedTuple):
    """What a request has besides its tokens."""

    images: str
    adapter: str
    salt: str | None

    def until(self, end: int) -> Hashable:
        """Returns what can influence the KV of the tokens before `end`."""
        return self.adapter, self.salt, tuple(image for image in IMAGES[self.images] if image[1] < end)


ALL = [Inputs(*each) for each in itertools.product(IMAGES, ADAPTERS, SALTS)]


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[Inputs, VllmRequest]:
    """A request per combination, hashed by vLLM, with adapters of different weights."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    adapters, folder = LoraAdapters(RateLimitedLog()), tmp_path_factory.mktemp("adapters")
    loaded: dict[str, Any] = {"none": None}
    for number, name in enumerate(ADAPTERS[1:], start=1):
        make_adapter(folder / name, seed=number)
        loaded[name] = LoRARequest(name, number, str(folder / name))

    def adapted(inputs: Inputs) -> VllmRequest:
        adapter = loaded[inputs.adapter]
        request = Request(
            "r",
            PROMPT,
            SamplingParams(max_tokens=1),
            None,
            lora_request=adapter,
            cache_salt=inputs.salt,
            mm_features=[
                MultiModalFeatureSpec(None, "image", content, PlaceholderRange(first, tokens))
                for content, first, tokens in IMAGES[inputs.images]
            ],
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        tag = wait_until(lambda: adapters.tag_of(adapter)) if adapter is not None else b""
        geometry = CacheGeometry((GROUP,), BLOCK, BLOCK)
        return VllmRequest(request, RequestRegistration("r"), geometry, may_load=True, may_save=True, tag=tag)

    return {inputs: adapted(inputs) for inputs in ALL}


@pytest.mark.parametrize("position", range(4))
def test_keys_are_equal_only_for_equal_inputs(requests: dict[Inputs, VllmRequest], position: int) -> None:
    """Each pair of requests shares a block exactly if all inputs before its end are equal.

    The last, partial block is that of a hand-off, in which only its key tells the inputs apart.
    """
    meanings: dict[bytes, set[Hashable]] = {}
    keys: dict[Hashable, set[bytes]] = {}
    for inputs, request in requests.items():
        if position < 3:
            assert request.final_blocks(GROUP) == 3
            key, end = request.key(GROUP, position), (position + 1) * BLOCK
        else:
            partial = request.hold_key("engine", "r", GROUP, position, len(PROMPT))
            assert partial is not None
            key, end = partial, len(PROMPT)
        meanings.setdefault(key, set()).add(inputs.until(end))
        keys.setdefault(inputs.until(end), set()).add(key)
    assert all(len(of_key) == 1 for of_key in meanings.values()), "a key stands for different KV"
    assert all(len(of_inputs) == 1 for of_inputs in keys.values()), "equal KV has different keys"


def test_adapters_with_one_name_and_other_weights_have_other_keys(tmp_path: Path) -> None:
    """The tag covers the files of an adapter, which vLLM's hashes do not."""
    from vllm.lora.request import LoRARequest

    tags = set()
    for seed in (1, 2):
        make_adapter(tmp_path / "adapter", seed=seed)
        adapters = LoraAdapters(RateLimitedLog())
        request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
        tags.add(wait_until(lambda adapters=adapters, request=request: adapters.tag_of(request)))  # type: ignore[misc]
    assert len(tags) == 2
