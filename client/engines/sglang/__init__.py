"""kvtier as a storage back end of SGLang's HiCache (SGLang 0.5.23).

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache
        --hicache-mem-layout page_first_direct --hicache-io-backend direct
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvtier", "module_path": "kvtier.client.engines.sglang",
        "class_name": "KVTierStorage", "interface_v1": 1,
        "endpoint": "unix:/run/kvtier/kvtier.sock"}'

HiCache keeps pages of KV in a pool in host memory. Each rank of the engine has its own pool, and
its own `KVTierStorage`, which copies pages between this pool and the slots of the kvtier server.
A page is a block, and a rank stores one part of each block.

`storage` has the hooks that SGLang calls. `links` makes the calls to the server for one pool.
`found_pages` keeps what a lookup has found until the pages are loaded, and searches the end of a
prefix that all pools of a hybrid model can restore. `namespaces` says which engines share blocks.
"""

from .storage import KVTierStorage

__all__ = ["KVTierStorage"]
