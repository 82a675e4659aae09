"""transformers' `generate` with kvtier: loads the known prefix and stores what was computed.

    from kvtier.client.engines.transformers import KVTierCache

    with KVTierCache(model) as kv:  # endpoint: KVTIER_ENDPOINT, or the default socket
        output = kv.generate(input_ids, max_new_tokens=64)

Works in one process, with one sequence at a time and full attention only. Needs transformers 4.56
or newer.
"""

from .cache import Hit, KVTierCache
from .cache_layout import UnsupportedModelError

__all__ = ["Hit", "KVTierCache", "UnsupportedModelError"]
