"""transformers' `generate` with kvtier: the prefix comes from the store, what was computed goes to it.

    from kvtier.client.engines.transformers import KVTierCache

    with KVTierCache(model) as kv:                       # endpoint: KVTIER_ENDPOINT, or the default socket
        output = kv.generate(input_ids, max_new_tokens=64)

The smallest real engine: one process, one sequence at a time, full attention. Works with transformers 4.56 and newer.
"""

from .cache import Hit, KVTierCache
from .cache_layout import UnsupportedModelError

__all__ = ["Hit", "KVTierCache", "UnsupportedModelError"]
