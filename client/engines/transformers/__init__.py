"""transformers' `generate` with kvtier: loads the known prefix and stores what was computed.

    from kvtier.client.engines.transformers import KVTierCache

    with KVTierCache(model) as kv:  # endpoint: KVTIER_ENDPOINT, or the default socket
        kv.wait_until_identified(60)  # until then, every lookup is a miss
        output = kv.generate(input_ids, max_new_tokens=64)

The model must run in one process and use full attention only. The batch size is 1. Needs
transformers 4.56 or newer. `docs/purity.md` lists what the KV depends on, and how it is noticed.
"""

from .cache import Hit, KVTierCache
from .layout import UnsupportedModelError

__all__ = ["Hit", "KVTierCache", "UnsupportedModelError"]
